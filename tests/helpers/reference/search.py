"""The rule "search-1": the scale with the smallest squared error of a row or group (SPEC 3.6).

It is also the rule "search" of groups and with importance; other rows have a search of their own
(`fixed_search.py`).

A row is that of a matrix, or a group of its columns. All sums are in the order that the
specification prescribes, so that scales have the same bits as those of the C library.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ktconv.formats import Format
from ktconv.formats.integers import ftz
from ktconv.formats.search import storable
from ktconv.system.arrays import F32, I8, Array

from .fixed_search import fixed_scale
from .rounding import reciprocal

F64 = npt.NDArray[np.float64]
LAST = 21  # candidate scales are (420 - 13 n) / 420 of the first, n up to this
_COARSE, _FINE = range(0, LAST + 1, 3), (-2, -1, 1, 2)
_STEPS = 2  # by least squares
_LANES, _BLOCK = 16, 512
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # of the largest weight in a row that is searched


class Choice(Struct, frozen=True):
    """Rule for scales, and importance of the squared errors of each column [K]."""

    rule: Literal["amax", "search", "search-1"] = "amax"
    importance: F32 | None = None


AMAX = Choice()


def nearest_codes(fmt: Format, matrix: F32, scale: F32) -> I8:
    """Codes int8 [N, K] under scales [N]: rounded once, and cut to the levels."""
    top, step = np.float32(fmt.traits.max_level), np.float32(fmt.traits.scale_units) * scale
    y = np.clip(ftz(matrix) * reciprocal(step)[:, None], -top, top)
    codes: I8 = np.rint(y).astype(np.int8)
    return codes


def searched_row_scale(fmt: Format, rows: F32, first: F32, choice: Choice) -> F32:
    """Scales [N] by the search of `choice`, of whole rows [N, K] of INT4 or INT8."""
    if choice.rule == "search" and choice.importance is None:
        return fixed_scale(fmt, rows, first)
    return searched_scale(fmt, rows, first, choice.importance)


def searched_scale(fmt: Format, rows: F32, first: F32, importance: F32 | None) -> F32:
    """Scales [N] of rows [N, K], K % 32 == 0, whose largest weights make the scales `first`.

    importance: [K], or [N, K].
    """
    amax = np.abs(rows).max(axis=1)
    best: F32 = first.copy()
    usual = (amax >= _SMALLEST) & (amax <= _LARGEST)
    if usual.any():
        weight = np.ones(1, np.float32) if importance is None else importance
        weights = np.broadcast_to(weight, rows.shape)[usual]
        best[usual] = _Search(fmt, np.abs(rows[usual]), weights, first[usual]).run()
    return best


class _Search:
    """The search for some rows at once; `_best` and what belongs to it has a value for each."""

    def __init__(self, fmt: Format, rows: F32, importance: F32, first: F32) -> None:
        self._fmt, self._rows, self._importance, self._first = fmt, rows, importance, first
        self._weighted = importance * rows
        self._units = fmt.traits.scale_units
        self._best: F32 = first.copy()
        self._number = np.zeros(len(rows), np.int64)
        self._gain = np.full(len(rows), -np.inf)
        self._product, self._square = np.zeros((2, len(rows)))

    def run(self) -> F32:
        everywhere = np.ones(len(self._rows), bool)
        for n in _COARSE:
            self._try(self._candidate(np.full(len(self._rows), n)), everywhere, n)
        middle = self._number
        for step in _FINE:
            self._try(self._candidate(np.minimum(middle + step, LAST)), everywhere)
        going = self._square > 0
        least = self._candidate(np.full(len(self._rows), LAST))
        for _ in range(_STEPS):
            with np.errstate(divide="ignore", invalid="ignore"):
                step_size = self._product / self._square / self._units
            scale = storable(self._fmt, np.where(going, step_size, 1.0).astype(np.float32))
            going = going & (scale >= least)
            going = self._try(scale, going)
        return self._best

    def _candidate(self, n: Array) -> F32:
        shrunk: F32 = self._first * ((420.0 - 13.0 * n) / 420.0).astype(np.float32)
        return storable(self._fmt, shrunk)

    def _try(self, scale: F32, where: Array, number: int | None = None) -> npt.NDArray[np.bool_]:
        """Keeps each scale that is better than those before; which ones are."""
        step = scale * np.float32(self._units)
        product, square = self._sums(step)
        wide = step.astype(np.float64)
        gain = wide * (2.0 * product - wide * square)
        better: npt.NDArray[np.bool_] = where & (gain > self._gain)
        for kept, new in (
            (self._best, scale), (self._gain, gain), (self._product, product),
            (self._square, square),
        ):  # fmt: skip
            np.copyto(kept, new, where=better)
        if number is not None:
            self._number = np.where(better, number, self._number)
        return better

    def _sums(self, step: F32) -> tuple[F64, F64]:
        """Over the codes c of each row: v |w| |c| and v c c, v its importance."""
        codes = self._rows * (np.float32(1) / step)[:, None]
        np.minimum(codes, np.float32(self._fmt.traits.max_level), out=codes)
        np.rint(codes, out=codes)
        product = _lane_sums(self._weighted * codes)
        codes *= codes
        codes *= self._importance
        return product, _lane_sums(codes)


def _lane_sums(terms: F32) -> F64:
    """Sums of [N, K]: of every 16th column of 512 in binary32, then in binary64."""
    lanes = np.zeros((len(terms), _LANES))
    for begin in range(0, terms.shape[1], _BLOCK):
        block = terms[:, begin : begin + _BLOCK].reshape(len(terms), -1, _LANES)
        sums, *others = np.array(block.swapaxes(0, 1), order="C")
        for other in others:  # unlike np.sum, always in this order
            sums += other
        lanes += sums
    total: F64 = np.add.accumulate(lanes, axis=1)[:, -1]
    return total
