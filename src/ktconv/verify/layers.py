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
from ktconv.conversion.plan import matrix_source_bytes
from ktconv.formats.decode import bf16_to_f32
from ktconv.moe import KERNEL_BOUND, Experts
from ktconv.moe.load import activation_of, packed_experts
from ktconv.reading.tensors import SourceTensors
from ktconv.system.pool import Pool
from ktconv.verify.findings import Findings
from ktconv.verify.hidden_states import LEVEL, HiddenStates, Inputs
from ktconv.verify.memory import Budget
from ktconv.verify.reference import LayerReference, Outputs, relative
from ktconv.verify.subject import Subject

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]


def check_layers(
    subject: Subject,
    request: Any,
    budget: Budget,
    findings: Findings,
    progression: Callable[[dict[str, int]], AbstractContextManager[Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Runs the layers; facts for the report."""
    assert subject.checkpoint is not None
    states = HiddenStates(subject, request, budget, findings, say)
    check = _Layers(subject, request, budget, findings, states)
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
    """The check of one layer after the other, some experts of it at a time."""

    def __init__(
        self,
        subject: Subject,
        request: Any,
        budget: Budget,
        findings: Findings,
        states: HiddenStates,
    ) -> None:
        assert subject.checkpoint is not None
        self._subject, self._request, self._findings = subject, request, findings
        self._budget = budget
        self._config = subject.checkpoint.config
        self._source = SourceTensors(subject.checkpoint)
        self._states = states

    def layer(self, layer: MoELayer) -> dict[str, Any]:
        experts = packed_experts(self._subject.packed, layer.index, activation_of(self._config))
        inputs = self._states.of(layer, self._subject.packed.layers[layer.index].here)
        with np.errstate(all="ignore"):  # damaged scales are named by level weights
            return self._compare(layer, experts, inputs)

    def _compare(self, layer: MoELayer, experts: Experts, inputs: Inputs) -> dict[str, Any]:
        def compute(expert: int, x: F32) -> Outputs:
            packed, rounded = experts.outputs(experts.streams(expert), x)
            return Outputs(packed, rounded, experts.output(self._source.expert(layer, expert), x))

        x = bf16_to_f32(inputs.x)
        reference = LayerReference(x, compute, self._budget.layer_threads)
        kernel_error, y = self._outputs(experts, inputs, reference)
        for isa, error in kernel_error.items():
            self._judge(layer.index, isa, error)
        return reference.facts(layer, inputs, kernel_error, y, self._states.shared(layer, x))

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

    def _outputs(
        self, experts: Experts, inputs: Inputs, reference: LayerReference
    ) -> tuple[dict[str, float], F32]:
        """The largest error by level of the kernels, and what the last of these computes.

        Experts whose packed weights fit into memory together run in one call.
        """
        errors: dict[str, float] = {}
        total = np.zeros(inputs.x.shape, np.float32)
        with Pool(self._request.threads) as pool:
            for group in _groups(
                inputs.experts, self._budget.experts_at_once(experts.expert_bytes)
            ):
                part = inputs.only(group)
                expected, y = reference.add(part), total
                for isa, y in _on_all_levels(experts, part, pool):
                    error = relative(y, expected)
                    errors[isa] = float(np.maximum(errors.get(isa, 0.0), error))  # NaN stays
                total += y
                experts.release()
        return errors, total


def _on_all_levels(experts: Experts, inputs: Inputs, pool: Pool) -> Iterator[tuple[str, F32]]:
    before = native.isa()
    try:
        for isa in native.isa_available():
            native.use_isa(isa)
            yield isa, bf16_to_f32(experts.forward(inputs.x, inputs.ids, inputs.weights, pool))
    finally:
        native.use_isa(before)


def _groups(experts: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(experts), count):
        yield experts[first : first + count]
