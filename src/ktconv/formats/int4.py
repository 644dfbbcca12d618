"""INT4: 15 levels, -7 to 7 steps of 16 d, one float32 scale d per row (SPEC 3).

The stored d is the step of an 8-bit code in -112..112; a 4-bit level is 16 of those.
"""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, I8, I32

from .rounding import first_rounding, ftz, row_amax
from .search import AMAX, Choice, nearest_codes, searched_row_scale
from .table import Format


def scale_of(amax: F32) -> F32:
    """d = ftz(fl32(fl64(amax / 112))) (SPEC 3.2)."""
    return ftz((amax.astype(np.float64) / 112.0).astype(np.float32))


def second_rounding(q: I32) -> I32:
    """c = sign(q) * floor((|q| + 8) / 16): ties away from zero, any shape (SPEC 3.4)."""
    c: I32 = np.sign(q) * ((np.abs(q) + 8) // 16)
    return c


def quantize(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[I8, F32]:
    """Codes int8 [N, K] in -7..7 and scales float32 [N] of a finite [N, K] matrix."""
    scale = scale_of(row_amax(matrix))
    if choice.rule != "amax":
        scale = searched_row_scale(fmt, matrix, scale, choice)
        return nearest_codes(fmt, matrix, scale), scale
    return second_rounding(first_rounding(matrix, scale)).astype(np.int8), scale


def dequantize(fmt: Format, codes: I8, scale: F32) -> F32:
    """fl32(code * (16 d)), float32 [N, K]; 16 d is exact."""
    step: F32 = np.float32(16) * scale
    return codes.astype(np.float32) * step[:, None]
