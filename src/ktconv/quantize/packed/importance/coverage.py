"""Coverage of the experts of each layer by a file of importance, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktconv.quantize.packed.importance.channel_weights import SHRINKAGE
from ktconv.system.arrays import I64
from ktconv.system.units import counted

_SHOWN = 8  # layers of the table, those with the fewest tokens first


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """Coverage of one layer: tokens [E] that each expert got."""

    counts: I64

    @property
    def without(self) -> int:
        """Experts without tokens, whose weights are those of the layer."""
        return int((self.counts == 0).sum())

    @property
    def seldom(self) -> int:
        """Experts with tokens, but so few that the layer counts more than they do."""
        return int(((self.counts > 0) & (self.counts < SHRINKAGE)).sum())

    def facts(self) -> dict[str, int]:
        """Facts for JSON, and the numbers of a row of the table."""
        return {
            "tokens_min": int(self.counts.min()),
            "tokens_median": int(np.median(self.counts)),
            "tokens_max": int(self.counts.max()),
            "experts": len(self.counts),
            "experts_without_tokens": self.without,
            "experts_mostly_of_layer": self.seldom,
        }


def coverage_facts(layers: Mapping[int, LayerCoverage]) -> dict[str, Any]:
    """Facts for JSON: totals and every layer."""
    return {
        "experts": sum(len(one.counts) for one in layers.values()),
        "experts_without_tokens": sum(one.without for one in layers.values()),
        "experts_mostly_of_layer": sum(one.seldom for one in layers.values()),
        "layers": {str(index): one.facts() for index, one in layers.items()},
    }


def coverage_lines(layers: Mapping[int, LayerCoverage]) -> list[str]:
    """Lines for people: the layers whose experts saw least, and the totals."""
    rows = {index: one.facts() for index, one in layers.items()}
    worst = sorted(rows, key=lambda index: _order(rows[index]))
    head = f"{'layer':>7}  {'least':>9}  {'median':>9}  {'most':>9}  none  below {SHRINKAGE}"
    lines = ["tokens of each expert in the file of importance", head]
    lines += [_row(index, rows[index]) for index in worst[:_SHOWN]]
    if len(worst) > _SHOWN:
        lines.append(f"    and {counted(len(worst) - _SHOWN, 'layer')} whose experts saw more")
    return [*lines, _total(coverage_facts(layers))]


def _order(row: Mapping[str, int]) -> tuple[int, int, int]:
    few = row["experts_without_tokens"] + row["experts_mostly_of_layer"]
    return -row["experts_without_tokens"], -few, row["tokens_median"]


def _row(index: int, row: Mapping[str, int]) -> str:
    numbers = "  ".join(f"{row[f'tokens_{name}']:>9}" for name in ("min", "median", "max"))
    without, seldom = row["experts_without_tokens"], row["experts_mostly_of_layer"]
    return f"{index:>7}  {numbers}  {without:>4}  {seldom:>9}"


def _total(facts: Mapping[str, Any]) -> str:
    without, seldom = facts["experts_without_tokens"], facts["experts_mostly_of_layer"]
    return (
        f"of {counted(facts['experts'], 'expert')} {without} got no token and {seldom} fewer than "
        f"{SHRINKAGE}: their weights are mostly those of their layer"
    )
