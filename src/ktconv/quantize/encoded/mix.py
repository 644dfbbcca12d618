"""The methods of a recipe, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.system.units import counted, format_ranges, format_size
from ktconv.targets.encoded.config import recipe_shares
from ktconv.targets.encoded.target import Plan, encoded_bytes, matrix_kinds


def method_facts(plan: Plan) -> list[dict[str, Any]]:
    """Facts by method: layers, projections, matrices, bytes and bits per weight; empty without a
    recipe."""
    if plan.target.recipe is None:
        return []
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    for unit in plan.layers:
        for (proj, scheme), experts in plan.target.schemes_of(unit.layer, unit.experts).items():
            matrices = [unit.layer.experts[expert][proj] for expert in experts]
            nbytes, weights = sizes.get((scheme.name, scheme.group_size), (0, 0))
            sizes[scheme.name, scheme.group_size] = (
                nbytes + encoded_bytes(scheme, matrix_kinds(matrices)),
                weights + sum(one.rows * one.cols for one in matrices),
            )
    found = []
    for share in recipe_shares(plan):
        nbytes, weights = sizes[share.method.name, share.method.group_size]
        found.append(
            {
                "method": share.method.name,
                "group_size": share.method.group_size,
                "layers": format_ranges([*share.layers]),
                "projections": list(share.projections),
                "experts": None if share.whole else share.experts,
                "matrices": share.matrices,
                "bytes": nbytes,
                "bits": round(8 * nbytes / weights, 3),
            }
        )
    return found


def method_lines(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines for people about methods."""
    lines = []
    for one in facts:
        where = f"layers {one['layers']}, {' '.join(one['projections'])}"
        if one["experts"] is not None:
            where += f", {counted(one['experts'], 'expert')}"
        lines.append(
            f"{one['method']:<21} {one['matrices']:>8} matrices {format_size(one['bytes']):>9}"
            f"  {one['bits']:.3f} bits  {where}"
        )
    weights = sum(8 * one["bytes"] / one["bits"] for one in facts)
    nbytes = sum(one["bytes"] for one in facts)
    return [
        *lines,
        f"{'all':<31}          {format_size(nbytes):>9}  {8 * nbytes / weights:.3f} bits",
    ]
