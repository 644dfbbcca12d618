"""How much memory calibration needs, from headers and settings, before anything is loaded.

The model is in memory in bf16, or partly on disk; one layer at a time is computed, on the GPU if
there is one. Beside its weights, a layer needs the sums of products of its inputs, memory for
rounding, and the hidden states of all samples between two layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ktconv.checkpoint import Checkpoint, MoELayer
from ktconv.errors import ResourceError
from ktconv.families.config import sections_of
from ktconv.model.decoded import encoded_weights
from ktconv.system.units import format_size

BF16, F32 = 2, 4
ROUNDING_BYTES = 1 << 30  # on the CPU, for the matrices that are rounded at once
PYTHON_BYTES = 1 << 30  # the interpreter with PyTorch, and what allocators waste


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. `weights` of the whole model, `layer` of the largest one with all its experts,
    `sums` of input products while it is calibrated, `rounding` while it is rounded, `states` of
    all samples between two layers, `attention` of one sample."""

    weights: int
    layer: int
    sums: int
    rounding: int
    states: int
    attention: int

    @property
    def computing(self) -> int:
        """Where a layer is computed, beside its weights."""
        return self.sums + self.rounding + self.attention

    @property
    def gpu(self) -> int:
        return self.layer + self.computing

    def cpu(self, gpu: bool) -> int:
        """With the whole model in memory; a layer is there twice while it is taken apart."""
        there = self.weights + self.layer + self.states + PYTHON_BYTES
        return there if gpu else there + self.computing

    def cpu_beside_weights(self, gpu: bool) -> int:
        """What the CPU needs when all other weights are on disk: a layer, twice."""
        return self.cpu(gpu) - self.weights + self.layer


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights go: `cpu_weights` bytes of them into memory, None for all; the rest to disk."""

    need: Need
    cpu_weights: int | None
    disk: int


def estimate(
    checkpoint: Checkpoint, chosen: Mapping[int, Sequence[int]], samples: int, max_seq_len: int
) -> Need:
    """For calibrating the experts `chosen` (layer -> ids) of a checkpoint."""
    layers = [layer for layer in checkpoint.layers if not layer.is_mtp]
    size = {layer.index: BF16 * _elements(layer) for layer in layers}
    others = sum(BF16 * prod(tensor.shape) for tensor in checkpoint.other_tensors)
    decoded = encoded_weights(checkpoint)
    largest = max(layers, key=lambda layer: size[layer.index])
    hidden, inner = largest.hidden_size, largest.intermediate_size
    experts = max((len(ids) for ids in chosen.values()), default=0)
    longest = max(hidden, inner)
    one = F32 * (4 * longest**2 + 5 * hidden * inner)
    return Need(
        weights=decoded.nbytes if decoded else sum(size.values()) + others,
        layer=size[largest.index],
        sums=F32 * (hidden**2 + experts * inner**2),
        rounding=min(max(one, ROUNDING_BYTES), max(1, experts) * one),
        states=samples * max_seq_len * 2 * BF16 * hidden,  # a layer's inputs and its outputs
        # Where attention is not fused: scores, their softmax in float32, and its copy.
        attention=_heads(checkpoint.config) * max_seq_len**2 * (2 * BF16 + F32),
    )


def place(
    need: Need,
    free_cpu: int,
    max_cpu_memory: int | None,
    free_gpu: int | None,
    max_gpu_memory: int | None,
    free_disk: int,
) -> Placement:
    """Where the weights go, or ResourceError if they cannot go anywhere. `free_gpu` is None where
    there is no GPU; limits are those of --max-cpu-memory and --max-gpu-memory."""
    gpu = free_gpu is not None
    if free_gpu is not None:
        limit = min(free_gpu, max_gpu_memory or free_gpu)
        if need.gpu > limit:
            raise ResourceError(
                f"a layer needs {format_size(need.gpu)} on the GPU, but only "
                f"{format_size(limit)} may be used",
                "use a smaller --max-seq-len, --device cpu or --method rtn",
            )
    limit = min(free_cpu, max_cpu_memory or free_cpu)
    if need.cpu(gpu) <= limit:
        return Placement(need, None, 0)
    least = need.cpu_beside_weights(gpu)
    if max_cpu_memory is None or least > limit:
        raise ResourceError(
            f"calibration needs {format_size(need.cpu(gpu))} of memory, but only "
            f"{format_size(limit)} may be used",
            f"set --max-cpu-memory SIZE (at least {format_size(least)}) to keep the "
            "other weights on disk, or use --method rtn"
            if least <= free_cpu
            else "use fewer --samples, a smaller --max-seq-len or --method rtn",
        )
    cpu_weights = limit - least + need.layer
    disk = need.weights - cpu_weights
    if disk > free_disk:
        raise ResourceError(
            f"{format_size(disk)} of weights must lie on disk, but only "
            f"{format_size(free_disk)} are free on the disk of the output",
            "free some space or raise --max-cpu-memory",
        )
    return Placement(need, cpu_weights, disk)


def _elements(layer: MoELayer) -> int:
    each = layer.hidden_size * layer.intermediate_size
    return len(layer.projections) * each * len(layer.experts)


def _heads(config: Mapping[str, Any]) -> int:
    """Attention heads by config.json; else as many as large models have."""
    for section in sections_of(config):
        if isinstance(section.get("num_attention_heads"), int):
            return int(section["num_attention_heads"])
    return 128
