"""Level 3: each MoE layer computed by our kernels on the packed weights, and in float32.

Two questions: do the kernels compute what the packed weights stand for, on every level of
this machine (tight), and how far is that from the source's weights (reported).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import PROJECTIONS, MoELayer
from ktconv.formats.decode import bf16_to_f32
from ktconv.moe import KERNEL_BOUND, Experts
from ktconv.moe.opened import activation_of, packed_experts
from ktconv.plan import matrix_source_bytes
from ktconv.pool import Pool
from ktconv.verify.dense import SourceTensors
from ktconv.verify.findings import Findings
from ktconv.verify.hidden_states import HiddenStates, Inputs
from ktconv.verify.subject import Subject

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]

LEVEL = "layers"


def check_layers(
    subject: Subject,
    request: Any,
    findings: Findings,
    progression: Callable[[dict[str, int]], AbstractContextManager[Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Runs the layers; facts for the report."""
    assert subject.checkpoint is not None
    states = HiddenStates(subject, request, findings, say)
    check = _Layers(subject, request, findings, states)
    if any(geometry.elsewhere for geometry in subject.packed.layers.values()):
        findings.note("level layers: tokens skip the experts that are not in this output")
    say("kernels against float32")
    here = [one for one in subject.checkpoint.layers if one.index in subject.packed.layers]
    rows = each_layer(sampled(here, request), check.layer, progression)
    return {
        **states.facts,
        "isas": native.isa_available(),
        "kernel_bound": KERNEL_BOUND,
        "layers": rows,
    }


def each_layer(
    layers: Sequence[MoELayer],
    compute: Callable[[MoELayer], dict[str, Any]],
    progression: Callable[[dict[str, int]], AbstractContextManager[Any]],
) -> list[dict[str, Any]]:
    """What `compute` says of every layer, with progress by the bytes of their experts."""
    rows = []
    sizes = {_unit(layer): _bytes_of(layer) for layer in layers}
    with progression(sizes) as observer:
        if observer:
            observer.begin(list(sizes))
        for layer in layers:
            if observer:
                observer.unit_started(_unit(layer))
            rows.append(compute(layer))
            if observer:
                observer.advanced(sizes[_unit(layer)])
                observer.unit_finished(_unit(layer))
    return rows


def _unit(layer: MoELayer) -> str:
    return f"layer-{layer.index:05d}"


def _bytes_of(layer: MoELayer) -> int:
    return sum(matrix_source_bytes(layer, 0, proj) for proj in PROJECTIONS) * len(layer.experts)


def sampled(layers: Sequence[MoELayer], request: Any) -> list[MoELayer]:
    """At least one of them; the same for the same seed."""
    count = max(1, round(len(layers) * request.sample))
    chosen = random.Random(request.seed).sample(range(len(layers)), count)
    return [layers[index] for index in sorted(chosen)]


class _Layers:
    """The check of one layer after the other."""

    def __init__(
        self, subject: Subject, request: Any, findings: Findings, states: HiddenStates
    ) -> None:
        assert subject.checkpoint is not None
        self._subject, self._request, self._findings = subject, request, findings
        self._config = subject.checkpoint.config
        self._source = SourceTensors(subject.checkpoint)
        self._states = states

    def layer(self, layer: MoELayer) -> dict[str, Any]:
        experts = packed_experts(self._subject.packed, layer.index, activation_of(self._config))
        inputs = self._states.of(layer, self._subject.packed.layers[layer.index].here)
        with np.errstate(all="ignore"):  # damaged scales are named by level weights
            return self._compare(layer, experts, inputs)

    def _compare(self, layer: MoELayer, experts: Experts, inputs: Inputs) -> dict[str, Any]:
        truth = _Truth(experts, inputs, lambda expert: self._source.expert(layer, expert))
        kernel_error, y = {}, truth.rounded
        for isa, y in self._outputs(experts, inputs):
            kernel_error[isa] = relative(y, truth.rounded)
            self._judge(layer.index, isa, kernel_error[isa])
        shared = self._states.shared(layer, bf16_to_f32(inputs.x))
        worst = max(truth.errors, key=lambda expert: truth.errors[expert])
        return {
            "layer": layer.index,
            "kernel_error": kernel_error,
            "quantization_error": relative(y, truth.source),
            "quantization_error_with_shared": None
            if shared is None
            else relative(y + shared, truth.source + shared),
            "weights_error": relative(truth.packed, truth.source),
            "worst_expert": {"expert": worst, "error": truth.errors[worst]},
            "experts_run": len(truth.errors),
            "router_agreement": inputs.router_agreement,
        }

    def _judge(self, layer: int, isa: str, error: float) -> None:
        if error <= KERNEL_BOUND:
            return
        self._findings.fail(
            LEVEL,
            "kernel",
            f"layer {layer} on {isa}: the kernels are off by {error:.3g} from float32 arithmetic "
            f"on the same packed weights, at most {KERNEL_BOUND:g} is right.",
            layer=layer,
            value=error,
        )

    def _outputs(self, experts: Experts, inputs: Inputs) -> Iterator[tuple[str, F32]]:
        before = native.isa()
        with Pool(self._request.threads) as pool:
            try:
                for isa in native.isa_available():
                    native.use_isa(isa)
                    y = experts.forward(inputs.x, inputs.ids, inputs.weights, pool)
                    yield isa, bf16_to_f32(y)
            finally:
                native.use_isa(before)


class _Truth:
    """Float32 outputs of a layer's routed experts, one expert's matrices in memory at a time."""

    def __init__(self, experts: Experts, inputs: Inputs, source: Callable[[int], Any]) -> None:
        x = bf16_to_f32(inputs.x)
        self.rounded, self.packed, self.source = (np.zeros_like(x) for _ in range(3))
        self.errors: dict[int, float] = {}
        for expert in np.unique(inputs.ids[inputs.ids >= 0]):
            token, slot = np.nonzero(inputs.ids == expert)
            weight = inputs.weights[token, slot, None]
            values, original = experts.values(int(expert)), source(int(expert))
            got = experts.output(values, x[token])
            expected = experts.output(original, x[token])
            rounded = experts.output(values, x[token], rounded=True)
            self.errors[int(expert)] = relative(got, expected)
            for y, part in ((self.rounded, rounded), (self.packed, got), (self.source, expected)):
                np.add.at(y, token, weight * part)


def relative(got: F32, expected: F32) -> float:
    """Norm of the difference over the norm; 0 where both are 0."""
    off, norm = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    return off / norm if norm else (0.0 if off == 0 else float("inf"))
