"""Level layers: each MoE layer on the packed weights and, in float32, on the source's, with the
same hidden states and the model's own router.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from ktconv.formats.decode import bf16_to_f32
from ktconv.runtime.layers.experts import in_blocks
from ktconv.source import MoELayer
from ktconv.source.reading.matrices import experts_bytes
from ktconv.source.reading.tensors import SourceTensors
from ktconv.system.arrays import F32
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts, Progression
from ktconv.verify.hidden_states import HiddenStates, Inputs
from ktconv.verify.request import VerifyRequest
from ktconv.verify.runner import Progress, in_order, unit_of

if TYPE_CHECKING:
    from ktconv.verify.verifier import OutputVerifier


class LayersCheck(ABC):
    """Computes one layer after the other, with some of its experts in memory at a time."""

    compared: ClassVar[str]  # "kernels against float32"

    def __init__(self, verifier: OutputVerifier, notify: Notify) -> None:
        self._output, self._request = verifier.output, verifier.request
        self._budget, self._findings, self._notify = verifier.budget, verifier.findings, notify
        source = verifier.output.source
        self._source, self._config = SourceTensors(source), source.config
        self._states = HiddenStates(verifier, notify)

    def run(self, progression: Progression) -> Facts:
        layers, here = self._output.source_layers, self._output.experts_in
        if self._output.is_partial:
            self._findings.note("level layers: tokens skip the experts that are not in this output")
        self._notify(self.compared)
        present = [layer for index, layer in layers.items() if here(index)]
        rows = self._each(_sampled(present, self._request), progression)
        return {**self._states.facts, **self._kernels(), "layers": rows}

    def _kernels(self) -> Facts:
        """Names of the kernels that run, and the largest error that they may have."""
        return {"isas": [], "kernel_bound": None}

    def _each(self, layers: Sequence[MoELayer], progression: Progression) -> list[Facts]:
        """A row of the report for each layer, with progress by the bytes of its experts."""
        rows = []
        sizes = {unit_of(layer.index): experts_bytes(layer) for layer in layers}
        with progression(sizes) as observer:
            progress = Progress(sizes, observer)
            for layer, (unit, nbytes) in zip(layers, sizes.items(), strict=True):
                progress.start(unit)
                rows.append(self._layer(layer))
                progress.advance(nbytes)
                progress.finish(unit)
        return rows

    def _layer(self, layer: MoELayer) -> Facts:
        inputs = self._states.of(layer, self._output.experts_in(layer.index))
        with np.errstate(all="ignore"):  # level weights reports damaged scales
            return self._compare(layer, inputs, bf16_to_f32(inputs.x))

    @abstractmethod
    def _compare(self, layer: MoELayer, inputs: Inputs, x: F32) -> Facts:
        """A layer's row of the report; x [M, H] are the hidden states of `inputs` in float32."""


def _sampled(layers: Sequence[MoELayer], request: VerifyRequest) -> list[MoELayer]:
    """A random sample, at least one layer; the same for the same seed."""
    count = max(1, round(len(layers) * request.sample))
    chosen = random.Random(request.seed).sample(range(len(layers)), count)
    return [layers[index] for index in sorted(chosen)]


class Outputs(NamedTuple):
    """Outputs [M, H] of an expert. `rounded`: on the packed weights, with activations rounded as
    our kernels round them; the same as `packed` where none of our kernels runs."""

    packed: F32
    rounded: F32
    source: F32


class LayerReference:
    """Sums of the outputs in float32 that `compute` returns for each expert's tokens x [M, H].

    Threads compute one expert each, from a few rows of its matrices at a time, so that memory
    depends neither on the size nor on the number of experts. Sums are formed in the order of the
    experts.
    """

    def __init__(self, x: F32, compute: Callable[[int, F32], Outputs], threads: int) -> None:
        self._x, self._compute, self._threads = x, compute, threads
        self.packed, self.source = np.zeros_like(x), np.zeros_like(x)
        self.errors: dict[int, float] = {}

    def add(self, inputs: Inputs) -> F32:
        """Adds the outputs for these inputs. Returns their own sum with rounded activations."""
        together = np.zeros_like(self._x)

        def outputs(expert: int) -> Outputs:
            token, _ = np.nonzero(inputs.ids == expert)
            with np.errstate(all="ignore"):  # is set per thread
                return Outputs(*in_blocks(partial(self._compute, expert), self._x[token]))

        experts = inputs.experts
        # OpenBLAS's threads spin while they wait for one another, in every product.
        with threadpool_limits(limits=1, user_api="blas"):
            results = in_order(outputs, experts, self._threads, self._threads + 1)
            for expert, found in zip(experts, results, strict=True):
                token, slot = np.nonzero(inputs.ids == expert)
                weight = inputs.weights[token, slot, None]
                self.errors[expert] = relative(found.packed, found.source)
                np.add.at(together, token, weight * found.rounded)
                np.add.at(self.packed, token, weight * found.packed)
                np.add.at(self.source, token, weight * found.source)
        return together

    def facts(
        self, layer: MoELayer, inputs: Inputs, kernel: dict[str, float], y: F32, shared: F32 | None
    ) -> Facts:
        """The layer's row of the report: errors of the kernels by ISA level, and of y, the layer's
        output after conversion; `shared` is the output of shared experts."""
        worst = max(self.errors, key=lambda expert: self.errors[expert])
        return {
            "layer": layer.index,
            "kernel_error": kernel,
            "quantization_error": relative(y, self.source),
            "quantization_error_with_shared": None
            if shared is None
            else relative(y + shared, self.source + shared),
            "weights_error": relative(self.packed, self.source),
            "worst_expert": {"expert": worst, "error": self.errors[worst]},
            "experts_run": len(self.errors),
            "routing": inputs.routing,
            "router_agreement": inputs.router_agreement,
        }


def relative(got: F32, expected: F32) -> float:
    """Norm of the difference over the norm; 0 where both are 0."""
    off, norm = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    return off / norm if norm else (0.0 if off == 0 else float("inf"))
