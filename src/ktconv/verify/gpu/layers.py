"""Level 3 for experts on GPUs: each MoE layer in float32 on the dequantized weights and on the
source's, with the same hidden states and the model's own router.

No kernel of a GPU runs here: this says how far quantization moves a layer's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ktconv.checkpoint import PROJECTIONS, MoELayer
from ktconv.formats.decode import bf16_to_f32
from ktconv.moe.experts import expert_output
from ktconv.moe.load import activation_of
from ktconv.moe.streamed import Streams
from ktconv.reading.tensors import SourceTensors
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.gpu.opened import GpuOutput, Module
from ktconv.verify.gpu.weights import dequantized
from ktconv.verify.hidden_states import HiddenStates, Inputs
from ktconv.verify.layers import each_layer, sampled
from ktconv.verify.memory import Budget
from ktconv.verify.reference import F32, LayerReference, Outputs
from ktconv.verify.subject import Subject


def check_layers(
    subject: Subject,
    request: Any,
    budget: Budget,
    findings: Findings,
    progression: Progression,
    say: Callable[[str], None],
) -> Facts:
    """Runs the layers; facts for the report."""
    assert isinstance(subject, GpuOutput) and subject.checkpoint is not None
    states = HiddenStates(subject, request, budget, findings, say)
    check = _Layers(subject, budget, states)
    sources = subject.sources()
    if any(check.here(layer) != list(range(len(layer.experts))) for layer in sources.values()):
        findings.note("level layers: tokens skip the experts that are not in this output")
    say("dequantized experts against the source's")
    layers = sampled([layer for layer in sources.values() if check.here(layer)], request)
    rows = each_layer(layers, check.layer, progression)
    return {**states.facts, "isas": [], "kernel_bound": None, "layers": rows}


class _Layers:
    """One layer after the other, a few rows of one expert in memory at a time."""

    def __init__(self, output: GpuOutput, budget: Budget, states: HiddenStates) -> None:
        assert output.checkpoint is not None
        self._output, self._budget, self._states = output, budget, states
        self._activation = activation_of(output.checkpoint.config)
        self._source = SourceTensors(output.checkpoint)
        self._experts = output.layers()
        self._modules: dict[tuple[int | None, int, str], Module] = {
            (module.layer, module.where.expert, module.where.proj): module
            for module in output.modules.values()
            if module.where is not None
        }

    def here(self, layer: MoELayer) -> list[int]:
        return self._experts.get(layer.index, [])

    def layer(self, layer: MoELayer) -> Facts:
        inputs = self._states.of(layer, self.here(layer))
        with np.errstate(all="ignore"):  # damaged scales are named by level weights
            return self._compare(layer, inputs)

    def _compare(self, layer: MoELayer, inputs: Inputs) -> Facts:
        def compute(expert: int, x: F32) -> Outputs:
            packed = expert_output(self._streams(layer, expert), self._activation, x)
            source = expert_output(self._source.expert(layer, expert), self._activation, x)
            return Outputs(packed, packed, source)

        x = bf16_to_f32(inputs.x)
        reference = LayerReference(x, compute, self._budget.layer_threads)
        reference.add(inputs)
        return reference.facts(layer, inputs, {}, reference.packed, self._states.shared(layer, x))

    def _streams(self, layer: MoELayer, expert: int) -> Streams:
        gate, up, down = (
            dequantized(
                self._output,
                self._modules[layer.index, expert, proj],
                layer.experts[expert][proj],
            )
            for proj in PROJECTIONS
        )
        return gate, up, down
