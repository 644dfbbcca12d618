"""Level layers: each MoE layer on the packed weights and, in float32, on the source's, with the
same hidden states and the model's own router.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ktconv.checkpoint import MoELayer
from ktconv.formats.decode import bf16_to_f32
from ktconv.moe.load import activation_of
from ktconv.reading.matrices import experts_bytes
from ktconv.reading.tensors import SourceTensors
from ktconv.system.arrays import F32
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.hidden_states import HiddenStates, Inputs
from ktconv.verify.memory import Budget
from ktconv.verify.output import OpenedOutput
from ktconv.verify.request import VerifyRequest
from ktconv.verify.runner import Progress, unit_of


class LayersCheck(ABC):
    """Computes one layer after the other, with some of its experts in memory at a time."""

    compared: ClassVar[str]  # "kernels against float32"

    def __init__(
        self,
        output: OpenedOutput,
        request: VerifyRequest,
        budget: Budget,
        findings: Findings,
        notify: Notify,
    ) -> None:
        self._output, self._request, self._budget = output, request, budget
        self._findings, self._notify = findings, notify
        self._source = SourceTensors(output.source)
        self._activation = activation_of(output.source.config)
        self._states = HiddenStates(output, request, budget, findings, notify)

    def run(self, progression: Progression) -> Facts:
        layers, here = self._output.source_layers, self._output.experts_in
        if self._output.is_partial:
            self._findings.note("level layers: tokens skip the experts that are not in this output")
        self._notify(self.compared)
        present = [layer for index, layer in layers.items() if here(index)]
        rows = self._each(_sampled(present, self._request), progression)
        return {**self._states.facts, **self._kernels(), "layers": rows}

    def _kernels(self) -> Facts:
        """Which kernels run, and the largest error that they may have."""
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
