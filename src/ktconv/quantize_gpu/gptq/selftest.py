"""Self-test before hours of work: one real layer and a few samples through the whole path.

    report = self_test(checkpoint, layer, experts, samples, weights, dampening, scratch_folder)

The model is cut off after the layer, then loaded, calibrated and quantized as the whole one will
be. The layer's outputs must be at least as accurate as with experts rounded to nearest. The
scratch folder contains links and two small files, and is removed.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from torch import Tensor

from ktconv.checkpoint import Checkpoint, read_header
from ktconv.checkpoint.config import CONFIG_NAME
from ktconv.errors import CheckpointError, VerificationError
from ktconv.families import table
from ktconv.families.names import layer_number
from ktconv.model.decoded import encoded_weights
from ktconv.quantize_gpu.gptq.calibration import WITHOUT_MODEL, Samples
from ktconv.quantize_gpu.gptq.calibration_model import (
    LinearExperts,
    linear_experts,
    load_linear_model,
    model_dtype,
)
from ktconv.quantize_gpu.gptq.coverage import LayerCoverage
from ktconv.quantize_gpu.gptq.quantize import QuantizedMatrix, quantize_layers
from ktconv.writer.metadata import INDEX

SAMPLES, TOKENS = 2, 512
# GPTQ calibrates every expert on every token, but only routed tokens are compared: with very few of
# them a layer can be slightly worse than rounding to nearest.
TOLERANCE = 1.05


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Relative RMS errors of the layer's outputs: with GPTQ, and rounded to nearest."""

    layer: int
    experts: int
    gptq_error: float
    rtn_error: float
    seconds: float

    def words(self) -> str:
        """In a line."""
        return (
            f"self-test: the experts of layer {self.layer} are {self.gptq_error:.4f} off with "
            f"GPTQ, {self.rtn_error:.4f} rounded to nearest ({self.seconds:.1f} s)"
        )


def self_test(
    checkpoint: Checkpoint,
    layer: int,
    experts: Sequence[int],
    samples: Samples,
    weights: QuantizationArgs,
    dampening: float,
    scratch: Path,
    device: str = "cpu",
) -> SelfTest:
    """Quantize `experts` of `layer`. VerificationError if they are worse than rounded to nearest,
    or no number; what cannot be loaded or calibrated fails as the whole run would."""
    started = time.monotonic()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        _cut_model(checkpoint, layer + 1, scratch)
        loaded = load_linear_model(
            scratch, model_dtype(checkpoint), name=checkpoint.path,
            decoded=encoded_weights(checkpoint), layers=layer + 1,
        )  # fmt: skip
        gptq, rtn = _errors(loaded, layer, experts, samples, weights, dampening, device)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = SelfTest(layer, len(experts), gptq, rtn, time.monotonic() - started)
    if not gptq <= TOLERANCE * rtn:
        raise VerificationError(
            f"the self-test failed: experts of layer {layer} are {gptq:.4f} off with GPTQ and "
            f"{rtn:.4f} rounded to nearest",
            "try another --dataset, more --dampening or --method rtn; --no-self-test "
            "skips this test",
        )
    return found


# ---- a model that ends early -----------------------------------------------------------


def _cut_model(checkpoint: Checkpoint, layers: int, scratch: Path) -> None:
    """A checkpoint of the first `layers` layers: links to the shards, config and index cut."""
    config = copy.deepcopy(dict(checkpoint.config))
    _cut_config(config, layers)
    shard_of = dict(_first_layers(checkpoint, layers))
    index = {"metadata": {}, "weight_map": {name: path.name for name, path in shard_of.items()}}
    (scratch / CONFIG_NAME).write_text(json.dumps(config))
    (scratch / INDEX).write_text(json.dumps(index))
    for shard in sorted(set(shard_of.values())):
        (scratch / shard.name).symlink_to(shard.resolve())


def _cut_config(config: dict[str, Any], layers: int) -> None:
    """Counts of layers, and lists with an entry per layer, in all sections."""
    keys = table.FAMILIES.keys("layers")
    counts = [config[key] for key in keys if isinstance(config.get(key), int)]
    for key, value in config.items():
        if isinstance(value, dict):
            _cut_config(value, layers)
        elif key in keys and isinstance(value, int):
            config[key] = min(value, layers)
        elif isinstance(value, list) and counts and len(value) == counts[0]:
            config[key] = value[:layers]


def _first_layers(checkpoint: Checkpoint, layers: int) -> Iterator[tuple[str, Path]]:
    """Names of tensors with their shards, less those of later layers."""
    for file in checkpoint.files:
        for tensor in read_header(file).tensors:
            number = layer_number(tensor.name)
            if number is None or number < layers:
                yield tensor.name, file


# ---- measuring -------------------------------------------------------------------------


class _Keeper:
    """Events of a run; keeps the quantized matrices."""

    def __init__(self) -> None:
        self.matrices: list[QuantizedMatrix] = []

    def layer_started(self, layer: int) -> None:
        pass

    def progressed(self, layer: int, share: float) -> None:
        pass

    def layer_done(
        self, layer: int, matrices: Iterator[QuantizedMatrix], coverage: LayerCoverage
    ) -> None:
        self.matrices += matrices


def _errors(
    model: Any,
    layer: int,
    experts: Sequence[int],
    samples: Samples,
    weights: QuantizationArgs,
    dampening: float,
    device: str,
) -> tuple[float, float]:
    """Relative RMS errors with GPTQ and rounded to nearest."""
    few = samples.first(SAMPLES, TOKENS)
    site = linear_experts(model).get(layer)
    if site is None:
        raise CheckpointError(
            f"the experts of layer {layer} cannot be calibrated: llm-compressor finds none in the "
            "model of transformers",
            WITHOUT_MODEL,
        )
    before = {(e, p): linear.weight.detach().clone() for e, p, linear in site.linears()}
    inputs = _inputs(model, site, few)
    wanted = [_answer(site, call) for call in inputs]
    keeper = _Keeper()
    quantize_layers(model, few, {layer: experts}, weights, dampening, keeper, device)
    gptq = _relative(wanted, [_answer(site, call) for call in inputs])
    for matrix in keeper.matrices:
        original, scale = before[matrix.expert, matrix.projection], matrix.tensors["weight_scale"]
        rounded = fake_quantize(original.cpu(), scale, torch.zeros_like(scale), weights)
        linear = site.linear(matrix.expert, matrix.projection)
        update_offload_parameter(linear, "weight", rounded.to(linear.weight.dtype))
    return gptq, _relative(wanted, [_answer(site, call) for call in inputs])


def _inputs(model: Any, site: LinearExperts, samples: Samples) -> list[tuple[Tensor, ...]]:
    """What the layer's experts are called with."""
    found: list[tuple[Tensor, ...]] = []
    hook = site.module.register_forward_pre_hook(lambda _module, args: found.append(args))
    try:
        with torch.inference_mode():
            for ids in samples.ids:
                model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        hook.remove()
    return found


def _answer(site: LinearExperts, call: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        answer: Tensor = site.module(*(argument.clone() for argument in call))
    return answer.float().cpu()


def _relative(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    error = sum(float((a - b).square().sum()) for a, b in zip(wanted, found, strict=True))
    size = sum(float(a.square().sum()) for a in wanted)
    return (error / size) ** 0.5 if size else float("nan")
