"""Calibration coverage: how many tokens the router sent to each expert, and how it was rounded.

During calibration every expert computes every token, so that none is quantized without data. The
counts of the router alone show how well the text represents an expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, convert

from ktconv.system.arrays import I64
from ktconv.system.text import first_few

# Experts with fewer than this fraction of an equal share of tokens are listed.
SELDOM = 0.1


class LayerCoverage(Struct, frozen=True):
    """One layer. `routed[e]` is the number of tokens that the router sent to expert e, `top_k`
    the experts per token. `fell_back` names matrices ("12.up") that were rounded to the nearest
    level because GPTQ could not be computed for them."""

    tokens: int
    top_k: int
    routed: Sequence[int]
    fell_back: Sequence[str] = ()

    @property
    def threshold(self) -> float:
        """Experts with fewer routed tokens than this are named."""
        return SELDOM * self.tokens * self.top_k / len(self.routed)

    @property
    def seldom(self) -> list[int]:
        """Experts that the router chose less often than the threshold."""
        return [expert for expert, count in enumerate(self.routed) if count < self.threshold]

    def record(self) -> dict[str, Any]:
        """Record for the journal and the manifest."""
        return {
            "tokens": self.tokens,
            "top_k": self.top_k,
            "routed": list(self.routed),
            "seldom": self.seldom,
            "fell_back": list(self.fell_back),
        }


class Counter:
    """Adds up what routers chose, batch by batch, of one layer."""

    def __init__(self, experts: int) -> None:
        self.tokens = self.top_k = 0
        self.routed: I64 = np.zeros(experts, np.int64)

    def add(self, chosen: I64) -> None:
        """`chosen` [M, K]: the experts of M tokens, -1 for none. Rows without any do not count:
        Llama 4 has a row per token and expert."""
        there = chosen >= 0
        self.tokens += int(there.any(axis=1).sum())
        self.top_k = chosen.shape[1]
        self.routed += np.bincount(chosen[there], minlength=self.routed.size)

    def result(self, fell_back: Iterable[str]) -> LayerCoverage:
        return LayerCoverage(self.tokens, self.top_k, self.routed.tolist(), sorted(fell_back))


def coverage_lines(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Records of layers by number as a table for people: a line per layer, then the experts that
    were seldom used or fell back."""
    found = sorted((int(layer), convert(one, LayerCoverage)) for layer, one in records.items())
    head = f"{'layer':>5}  {'tokens':>9}  {'least':>9}  {'median':>9}  {'most':>9}  seldom"
    lines = [f"{head}  fell back"]
    for index, layer in found:
        routed = np.asarray(layer.routed)
        numbers = (layer.tokens, routed.min(), int(np.median(routed)), routed.max())
        columns = "  ".join(f"{number:>9}" for number in numbers)
        lines.append(f"{index:>5}  {columns}  {len(layer.seldom):>6}  {len(layer.fell_back):>9}")
    for index, layer in found:
        if layer.seldom:
            lines.append(
                f"layer {index}: {first_few(layer.seldom, 12)} got fewer than "
                f"{layer.threshold:.0f} routed tokens"
            )
        if layer.fell_back:
            lines.append(f"layer {index}: {first_few(layer.fell_back, 12)} rounded to nearest")
    return lines
