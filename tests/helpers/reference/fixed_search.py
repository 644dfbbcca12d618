"""The rule "search" of whole rows without importance: a search in fixed point (SPEC 3.8).

Magnitudes become integers, and sums are exact, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ktconv.formats import Format
from ktconv.system.arrays import F32

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
_MOST = 32767  # what the largest weight of a row becomes
_FIRST, _LAST = -2, 31  # numbers of the steps of INT4
_STEPS = {n: round(_MOST / 7 * 1.04**-n) for n in range(_FIRST, _LAST + 1)}
# Steps of INT8: of all rows; of short ones; of long ones.
_USUAL, _WIDE = (261, 258, 254, 250), (246, 241, 234, 225)
_NARROW = (265, 263, 256, 247, 268, 259, 252, 244)
_SHORT, _LONG = 512, 8192  # columns: fewer, or so many
# Of a polynomial of the third degree in three variables, in 256ths: 1; a, b, c; aa, ab, ac, bb, ...
_COEFFICIENTS = (
    7483, 32906, 29543, -140847, 237671, -229755, -145159, -83867, 345391, 125573, 55308, -248325,
    -317419, 141048, 463219, 81159, 70596, -249442, -255020, 39023,
)  # fmt: skip
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # of the largest weight in a row that is searched


def fixed_scale(fmt: Format, rows: F32, first: F32) -> F32:
    """Scales [N] of rows [N, K], whose largest weights make the scales `first`: INT4 or INT8."""
    amax = np.abs(rows).max(axis=1)
    found: F32 = first.copy()
    usual = (amax >= _SMALLEST) & (amax <= _LARGEST)
    if not usual.any():
        return found
    factor = np.float32(_MOST) / amax[usual]
    m = np.rint(np.abs(rows[usual]) * factor[:, None]).astype(np.int64)
    search = _Search(m)
    mean = search.int4(_first_numbers(m)) if fmt.traits.max_level == 7 else search.int8()
    step = mean * (amax[usual].astype(np.float64) / _MOST)
    found[usual] = step.astype(np.float32) / np.float32(fmt.traits.scale_units)
    return found


def _first_numbers(m: I64) -> I64:
    """Numbers [N] of the first of three steps that are tried, from the moments of rows."""
    cols = float(m.shape[1])
    rms = np.sqrt(1024.0 * ((m >> 5) ** 2).sum(axis=1).astype(np.float64) / cols)
    variables = (
        rms / _MOST,
        m.sum(axis=1).astype(np.float64) / cols / rms,
        np.full(len(m), np.sqrt(1 / np.sqrt(cols))),
    )
    y = np.zeros(len(m))
    for coefficient, term in zip(_COEFFICIENTS, _terms(variables), strict=True):
        y = y + coefficient / 256.0 * term
    number: I64 = np.clip(np.floor(1.244 * y + 0.5) - 2, _FIRST, _LAST - 4).astype(np.int64)
    return number


def _terms(x: tuple[F64, F64, F64]) -> Iterator[F64]:
    yield np.ones(len(x[0]))
    yield from x
    for i in range(3):
        for j in range(i, 3):
            yield x[i] * x[j]
    for i in range(3):
        for j in range(i, 3):
            for k in range(j, 3):
                yield x[i] * x[j] * x[k]


class _Search:
    """The search for rows of integers m [N, K]; what it has found has a value for each row.

    They are held as binary64, which computes with them several times as fast and exactly: products
    of a magnitude and an inverse are below 2^31, sums over fewer than 2^31 columns below 2^53."""

    def __init__(self, m: I64) -> None:
        self._m = m.astype(np.float64)
        self._gain = np.full(len(m), np.iinfo(np.int64).min)
        self._number, self._product, self._square = np.zeros((3, len(m)), np.int64)
        self._all = np.arange(len(m))

    def int4(self, low: I64) -> F64:
        """The mean size [N] of a step, by least squares of the best codes; the first of three
        steps that are tried has the number `low`."""
        high = low + 4
        for n in (low, low + 2, high):
            self._try_int4(n, self._all)
        while True:
            down = (self._number == low) & (low > _FIRST + 1)
            up = (self._number == high) & (high < _LAST - 1)
            rows = np.flatnonzero(down | up)
            if not len(rows):
                break
            near = np.where(down, low - 2, high + 2)
            low = np.where(down, np.maximum(low - 4, _FIRST), low)
            high = np.where(up, np.minimum(high + 4, _LAST), high)
            self._try_int4(near[rows], rows)
            self._try_int4(np.where(down, low, high)[rows], rows)
        self._try_int4(np.zeros_like(low), self._all)
        best = self._number.copy()
        self._try_int4(np.maximum(best - 1, _FIRST), self._all)
        self._try_int4(np.minimum(best + 1, _LAST), self._all)
        return self._product / self._square

    def int8(self) -> F64:
        """Likewise."""
        cols = self._m.shape[1]
        more = _NARROW if cols < _SHORT else _WIDE if cols >= _LONG else ()
        for step in (*_USUAL, *more):
            steps = np.full(len(self._m), step)
            self._try(steps, 8, steps, self._all)
        return self._product / self._square

    def _try_int4(self, number: I64, rows: I64) -> None:
        self._try(np.array(list(_STEPS.values()))[number - _FIRST], 4, number, rows)

    def _try(self, step: I64, bits: int, number: I64, rows: I64) -> None:
        """Keeps each step of these rows that is better than those before."""
        shift, top = (10, 7) if bits == 4 else (7, 127)
        inverse = np.rint(2.0 ** (16 + shift) / step)
        m = self._m if rows is self._all else self._m[rows]
        # ((m inverse >> 16) + half - 1) >> shift, whose two roundings down are one.
        codes = m * (inverse * 2.0 ** -(16 + shift))[:, None]
        codes += (2 ** (shift - 1) - 1) / 2**shift
        np.floor(codes, out=codes)
        np.minimum(codes, top, out=codes)
        product, square = (_row_products(one, codes).astype(np.int64) for one in (m, codes))
        gain = step * (2 * product - step * square)
        better = gain > self._gain[rows]
        for kept, new in (
            (self._gain, gain), (self._number, number), (self._product, product),
            (self._square, square),
        ):  # fmt: skip
            kept[rows[better]] = new[better]


def _row_products(a: F64, b: F64) -> F64:
    """Products [N] of rows of [N, K], which are integers: exact in any order."""
    found: F64 = np.einsum("nk,nk->n", a, b)
    return found
