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
from ktconv.moe.experts import Matrices, gated
from ktconv.moe.opened import activation_of
from ktconv.verify.dense import SourceTensors
from ktconv.verify.findings import Findings
from ktconv.verify.gpu.opened import GpuOutput, Module
from ktconv.verify.gpu.unpack import F32
from ktconv.verify.gpu.weights import dequantized
from ktconv.verify.hidden_states import HiddenStates, Inputs
from ktconv.verify.kinds import Facts, Progression
from ktconv.verify.layers import each_layer, relative, sampled
from ktconv.verify.subject import Subject


def check_layers(
    subject: Subject,
    request: Any,
    findings: Findings,
    progression: Progression,
    say: Callable[[str], None],
) -> Facts:
    """Runs the layers; facts for the report."""
    assert isinstance(subject, GpuOutput) and subject.checkpoint is not None
    states = HiddenStates(subject, request, findings, say)
    check = _Layers(subject, states)
    sources = subject.sources()
    if any(check.here(layer) != list(range(len(layer.experts))) for layer in sources.values()):
        findings.note("level layers: tokens skip the experts that are not in this output")
    say("dequantized experts against the source's")
    layers = sampled([layer for layer in sources.values() if check.here(layer)], request)
    rows = each_layer(layers, check.layer, progression)
    return {**states.facts, "isas": [], "kernel_bound": None, "layers": rows}


class _Layers:
    """One layer after the other, one expert's matrices in memory at a time."""

    def __init__(self, output: GpuOutput, states: HiddenStates) -> None:
        assert output.checkpoint is not None
        self._output, self._states = output, states
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
        x = bf16_to_f32(inputs.x)
        packed, source = np.zeros_like(x), np.zeros_like(x)
        errors: dict[int, float] = {}
        for expert in map(int, np.unique(inputs.ids[inputs.ids >= 0])):
            token, slot = np.nonzero(inputs.ids == expert)
            weight = inputs.weights[token, slot, None]
            got = self._output_of(self._matrices(layer, expert), x[token])
            wanted = self._output_of(self._source.expert(layer, expert), x[token])
            errors[expert] = relative(got, wanted)
            np.add.at(packed, token, weight * got)
            np.add.at(source, token, weight * wanted)
        shared = self._states.shared(layer, x)
        worst = max(errors, key=lambda expert: errors[expert])
        error = relative(packed, source)
        return {
            "layer": layer.index,
            "kernel_error": {},
            "quantization_error": error,
            "quantization_error_with_shared": None
            if shared is None
            else relative(packed + shared, source + shared),
            "weights_error": error,
            "worst_expert": {"expert": worst, "error": errors[worst]},
            "experts_run": len(errors),
            "router_agreement": inputs.router_agreement,
        }

    def _matrices(self, layer: MoELayer, expert: int) -> Matrices:
        gate, up, down = (
            dequantized(
                self._output,
                self._modules[layer.index, expert, proj],
                layer.experts[expert][proj],
            )
            for proj in PROJECTIONS
        )
        return gate, up, down

    def _output_of(self, matrices: Matrices, x: F32) -> F32:
        gate, up, down = matrices
        result: F32 = gated(self._activation, x @ gate.T, x @ up.T) @ down.T
        return result
