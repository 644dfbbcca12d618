"""Coverage of the experts of each layer by a file of importance, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.quantize.packed.coverage import Row, facts_of, table
from ktconv.quantize.packed.importance.channel_weights import SHRINKAGE
from ktconv.system.arrays import I64
from ktconv.system.units import counted

_WITHOUT = "experts_without_tokens"  # their weights are those of the layer
_SELDOM = "experts_mostly_of_layer"  # so few tokens that the layer counts more than they do


def coverage_facts(layers: Mapping[int, I64]) -> dict[str, Any]:
    """Facts for JSON, of tokens [E] by layer: totals and every layer."""
    few = {
        _WITHOUT: lambda counts: int((counts == 0).sum()),
        _SELDOM: lambda counts: int(((counts > 0) & (counts < SHRINKAGE)).sum()),
    }
    return facts_of(layers, few)


def coverage_lines(layers: Mapping[int, I64]) -> list[str]:
    """Lines for people: the layers whose experts saw least, and the totals."""
    facts = coverage_facts(layers)
    heads = {_WITHOUT: "none", _SELDOM: f"below {SHRINKAGE}"}
    return [
        *table("tokens of each expert in the file of importance", facts["layers"], heads, _order),
        f"of {counted(facts['experts'], 'expert')} {facts[_WITHOUT]} got no token and "
        f"{facts[_SELDOM]} fewer than {SHRINKAGE}: their weights are mostly those of their layer",
    ]


def _order(row: Row) -> tuple[int, int, int]:
    return -row[_WITHOUT], -row[_WITHOUT] - row[_SELDOM], row["tokens_median"]
