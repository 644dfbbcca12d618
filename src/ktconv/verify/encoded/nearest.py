"""Whether codes of floating-point formats are the numbers nearest to their source, by their
definitions (docs/formats.md section 10), in NumPy: slow, and without the C library's code.

A code is a sign and the place of a level among those that the format has; of two levels that are
equally near, the one whose place is even is chosen. Weights are divided by their scale first.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from ktconv.system.arrays import F32, U8, Array, Bools
from ktconv.targets.packed.matrix_check import ErrorStats, sum_of_squares
from ktconv.verify.second_reader.numbers import E4M3


class Levels(Struct, frozen=True):
    """The magnitudes of a format, ascending, and the exponent of the largest."""

    values: F32
    top: int

    @property
    def middles(self) -> F32:
        """Exact: levels have few digits."""
        found: F32 = (self.values[1:] + self.values[:-1]) / np.float32(2)
        return found


E4M3_LEVELS = Levels(E4M3[:127], 8)
E2M1_LEVELS = Levels(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32), 2)
LEVELS = {"fp8": E4M3_LEVELS, "mxfp8": E4M3_LEVELS, "mxfp4": E2M1_LEVELS, "nvfp4": E2M1_LEVELS}


def places(magnitudes: F32, levels: Levels) -> Array:
    """Places of the nearest levels."""
    middles = levels.middles
    found = np.searchsorted(middles, magnitudes, side="left")
    tied = (found < len(middles)) & (middles[np.minimum(found, len(middles) - 1)] == magnitudes)
    even: Array = found + (tied & (found % 2 == 1))
    return even


def codes_of(kind: str, data: U8, rows: int, cols: int) -> tuple[Bools, Array]:
    """Signs and places [rows, cols] of stored codes."""
    if kind in ("fp8", "mxfp8"):
        code = data.reshape(rows, cols)
        return code >= 128, (code & 127).astype(np.int64)
    split = np.stack([data & 15, data >> 4], -1).reshape(rows, -1)[:, :cols]
    return split >= 8, (split & 7).astype(np.int64)


def expected_scales(kind: str, largest: F32, tensor_scale: float) -> Array:
    """Stored scales of groups with these largest magnitudes: float32 of fp8, else bytes."""
    if kind == "fp8":
        scales: F32 = np.maximum(largest, np.float32(1e-30)) / np.float32(448)
        return scales
    if kind == "nvfp4":
        wanted = np.float32(tensor_scale) * (largest / np.float32(6))
        place = places(wanted, E4M3_LEVELS)
        return np.where(place == 0, 0x20, place).astype(np.uint8)
    fraction, exponent = np.frexp(largest)  # 1/2 <= fraction < 1
    exponent = exponent - 1 + (fraction >= 0.875) - LEVELS[kind].top
    found = np.where(largest == 0, 0, np.clip(exponent + 127, 0, 254))
    return found.astype(np.uint8)


class Compared(Struct, frozen=True):
    """Result of comparing some rows."""

    sums: ErrorStats
    wrong: Bools  # [rows, cols]: codes that are not nearest


def compare(kind: str, source: F32, data: U8, divisor: F32) -> Compared:
    """`divisor` [rows, cols]: scales of the weights."""
    levels = LEVELS[kind]
    rows, cols = source.shape
    negative, place = codes_of(kind, data, rows, cols)
    with np.errstate(all="ignore"):
        wanted = places(np.abs(source / divisor), levels)
        known = place < len(levels.values)
        magnitude = levels.values[np.minimum(place, len(levels.values) - 1)]
        value = np.where(negative, -magnitude, magnitude) * divisor
        error = source - value
    wrong = ~known | (place != wanted) | ((negative != np.signbit(source)) & (source != 0))
    of_source, of_error, of_value = map(sum_of_squares, (source, error, value))
    zeros = int(np.count_nonzero(place == 0))
    sums = ErrorStats(of_source, of_error, of_value, 0.0, zeros, source.size)
    return Compared(sums, wrong)
