"""Tokens that the experts of each layer got: facts for JSON, and a table for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ktconv.system.arrays import I64
from ktconv.system.units import counted

_SHOWN = 8  # layers of a table

Row = Mapping[str, int]


def facts_of(layers: Mapping[int, I64], few: Mapping[str, Callable[[I64], int]]) -> dict[str, Any]:
    """Totals and every layer, of tokens [E] by layer. `few`: numbers of experts with few tokens,
    by the names of these facts."""
    rows = {str(index): _row(counts, few) for index, counts in layers.items()}
    totals = {name: sum(row[name] for row in rows.values()) for name in ("experts", *few)}
    return {**totals, "layers": rows}


def _row(counts: I64, few: Mapping[str, Callable[[I64], int]]) -> dict[str, int]:
    return {
        "tokens_min": int(counts.min()),
        "tokens_median": int(np.median(counts)),
        "tokens_max": int(counts.max()),
        "experts": len(counts),
        **{name: count(counts) for name, count in few.items()},
    }


def table(
    title: str, rows: Mapping[str, Row], heads: Mapping[str, str], order: Callable[[Row], Any]
) -> list[str]:
    """Lines of the layers that come first in `order`; `heads`: columns by the names of facts."""
    lines = [title, "  ".join(["  layer", "    least", "   median", "     most", *heads.values()])]
    for index in sorted(rows, key=lambda index: order(rows[index]))[:_SHOWN]:
        row = rows[index]
        spread = [f"{row[f'tokens_{name}']:>9}" for name in ("min", "median", "max")]
        more = [f"{row[name]:>{len(head)}}" for name, head in heads.items()]
        lines.append("  ".join([f"{index:>7}", *spread, *more]))
    if len(rows) > _SHOWN:
        lines.append(f"    and {counted(len(rows) - _SHOWN, 'layer')} whose experts saw more")
    return lines
