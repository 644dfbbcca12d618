"""Tokens that the experts of each layer got in a calibration, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.quantize.packed.coverage import facts_of, table
from ktconv.quantize.packed.gptq.inputs import FEWEST_TOKENS
from ktconv.system.arrays import I64
from ktconv.system.units import counted

_FELL = "experts_fell_back"


def coverage_facts(layers: Mapping[int, I64]) -> dict[str, Any]:
    """Facts for JSON, of tokens [E] by layer: totals and every layer."""
    return facts_of(layers, {_FELL: lambda counts: int((counts < FEWEST_TOKENS).sum())})


def coverage_lines(layers: Mapping[int, I64]) -> list[str]:
    """Lines for people: the layers whose experts saw least, and the totals."""
    facts = coverage_facts(layers)
    return [
        *table(
            "tokens of each expert in the calibration",
            facts["layers"],
            {_FELL: "fell back"},
            lambda row: (-row[_FELL], row["tokens_min"]),
        ),
        f"{facts[_FELL]} of {counted(facts['experts'], 'expert')} got fewer than "
        f"{counted(FEWEST_TOKENS, 'token')}: they are rounded to nearest, by a search weighted "
        "by importance",
    ]
