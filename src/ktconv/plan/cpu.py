"""The CPU's side: bytes of experts on each NUMA node in one of our weight formats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.formats import (
    FORMATS,
    PROJECTIONS,
    UNGATED,
    Format,
    format_named,
    kinds_of,
    packed_shape,
)
from ktconv.plan.ranks import LayerPlacement
from ktconv.plan.request import PlanRequest
from ktconv.plan.sizes import Layer, Model
from ktconv.system.machine import numa_nodes

DEFAULT = "int4"


class PackedSide(Struct, frozen=True):
    """Bytes by NUMA part."""

    method: str
    complete: Sequence[int]  # all experts, which KTransformers needs
    cold: Sequence[int] | None  # without those on GPUs, where experts are split

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "numa": len(self.complete),
            "bytes_per_node": list(self.complete),
            "bytes_per_node_without_hot": None if self.cold is None else list(self.cold),
        }


def cpu_side(
    model: Model, placements: Sequence[LayerPlacement], request: PlanRequest
) -> tuple[PackedSide | None, list[str]]:
    """Experts and bytes of each node, if the method can have the model's sizes, and why not
    otherwise. UsageError if `method` or `numa` was asked for and is impossible."""
    if model.packed is not None:
        return _as_packed(model, placements, request), []
    method, numa = request.method, request.numa
    fmt, parts = format_named(method or DEFAULT), numa or numa_nodes()
    reasons = dict.fromkeys(filter(None, (_why_not(one, fmt, parts) for one in model.layers)))
    if reasons:
        reason = f"no {fmt.name} experts for CPUs: {next(iter(reasons))}"
        if method is not None or numa:
            raise UsageError(reason, _fitting(model, fmt, parts))
        return None, [f"{reason}; {_fitting(model, fmt, parts)}"]
    each = {
        layer.index: [_part_bytes(layer, fmt, part, parts) for part in range(parts)]
        for layer in model.layers
    }
    here = {layer.index: len(layer.ids) for layer in model.layers}
    left = {one.layer.index: len(one.cold) for one in placements}
    complete, cold = (
        [sum(each[index][part] * count for index, count in counts.items()) for part in range(parts)]
        for counts in (here, left)
    )
    return PackedSide(fmt.key, complete, cold if request.splits else None), []


def _as_packed(
    model: Model, placements: Iterable[LayerPlacement], request: PlanRequest
) -> PackedSide:
    """The CPU's side as an output has it. UsageError for another method or number of parts."""
    assert model.packed is not None
    method, numa = request.method, request.numa
    layers = model.packed.layers
    parts = max(one.parts for one in layers.values())
    names = sorted({one.format.key for one in layers.values() if one.format})
    if (method is not None and [format_named(method).key] != names) or numa not in (0, parts):
        raise UsageError(
            f"{model.path} has {', '.join(names)} experts in {parts} NUMA parts",
            "omit --method and --numa; ktconv reshard changes the number of parts",
        )
    complete, cold = [0] * parts, [0] * parts
    for one in placements:
        for experts, totals in ((one.layer.ids, complete), (one.cold, cold)):
            for expert in experts:
                for part, size in enumerate(model.part_bytes[one.layer.index, expert]):
                    totals[part] += size
    return PackedSide(", ".join(names), complete, cold if request.splits else None)


def _why_not(layer: Layer, fmt: Format, parts: int) -> str | None:
    reason = fmt.check(layer.hidden, layer.intermediate, parts)
    return reason and f"layer {layer.index} cannot be packed: {reason}"


def _fitting(model: Model, fmt: Format, parts: int) -> str:
    """Advice on what is possible instead."""
    common = set.intersection(
        *(set(fmt.allowed_parts(one.hidden, one.intermediate)) for one in model.layers)
    )
    if common:
        return f"possible values of --numa: {', '.join(map(str, sorted(common)))}"
    keys = [
        key
        for key, row in FORMATS.items()
        if not any(row.check(one.hidden, one.intermediate, parts) for one in model.layers)
    ]
    return f"possible with --method {' or '.join(keys)}" if keys else "no format has such sizes"


def _part_bytes(layer: Layer, fmt: Format, part: int, parts: int) -> int:
    """Bytes of one expert in one part, with scales and biases."""
    return sum(
        fmt.stored(kind, *packed_shape(proj, layer.hidden, layer.intermediate, parts))[2]
        for proj in (PROJECTIONS if layer.gated else UNGATED)
        for kind in kinds_of(proj, part, layer.biased)
    )
