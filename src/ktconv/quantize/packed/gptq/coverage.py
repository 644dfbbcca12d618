"""Tokens that the experts of each layer got in a calibration, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ktconv.quantize.packed.gptq.inputs import FEWEST_TOKENS
from ktconv.system.arrays import I64
from ktconv.system.units import counted

_SHOWN = 8  # layers of the table, those with the most experts that fall back first


def coverage_facts(layers: Mapping[int, I64]) -> dict[str, Any]:
    """Facts for JSON, of tokens [E] by layer: totals and every layer."""
    rows = {str(index): _facts(counts) for index, counts in layers.items()}
    return {
        "experts": sum(len(counts) for counts in layers.values()),
        "experts_fell_back": sum(row["experts_fell_back"] for row in rows.values()),
        "layers": rows,
    }


def _facts(counts: I64) -> dict[str, int]:
    return {
        "tokens_min": int(counts.min()),
        "tokens_median": int(np.median(counts)),
        "tokens_max": int(counts.max()),
        "experts": len(counts),
        "experts_fell_back": int((counts < FEWEST_TOKENS).sum()),
    }


def coverage_lines(layers: Mapping[int, I64]) -> list[str]:
    """Lines for people: the layers whose experts saw least, and the totals."""
    facts = coverage_facts(layers)
    rows: dict[str, dict[str, int]] = facts["layers"]
    worst = sorted(
        rows, key=lambda index: (-rows[index]["experts_fell_back"], rows[index]["tokens_min"])
    )
    head = f"{'layer':>7}  {'least':>9}  {'median':>9}  {'most':>9}  fell back"
    lines = ["tokens of each expert in the calibration", head]
    for index in worst[:_SHOWN]:
        row = rows[index]
        numbers = "  ".join(f"{row[f'tokens_{name}']:>9}" for name in ("min", "median", "max"))
        lines.append(f"{index:>7}  {numbers}  {row['experts_fell_back']:>9}")
    if len(worst) > _SHOWN:
        lines.append(f"    and {counted(len(worst) - _SHOWN, 'layer')} whose experts saw more")
    return [
        *lines,
        f"{facts['experts_fell_back']} of {counted(facts['experts'], 'expert')} got fewer than "
        f"{counted(FEWEST_TOKENS, 'token')}: they are rounded to nearest, by a search weighted "
        "by importance",
    ]
