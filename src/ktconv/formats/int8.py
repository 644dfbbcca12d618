"""INT8: 255 levels, -127 d .. 127 d, one float32 scale d per row (SPEC 3)."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, I8

from .rounding import first_rounding, ftz, row_amax
from .search import AMAX, Choice, nearest_codes, searched_row_scale
from .table import Format

RECIPROCAL_OF_127 = np.float32(1) / np.float32(127)  # 0x3C010204 = (1 - 2^-28) / 127


def scale_of(amax: F32) -> F32:
    """d = ftz(fl32(ftz(amax) * fl32(1/127))); not a division by 127 (SPEC 3.2)."""
    return ftz(ftz(amax) * RECIPROCAL_OF_127)


def quantize(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[I8, F32]:
    """Codes int8 [N, K] in -127..127 and scales float32 [N] of a finite [N, K] matrix."""
    scale = scale_of(row_amax(matrix))
    if choice.rule != "amax":
        scale = searched_row_scale(fmt, matrix, scale, choice)
        return nearest_codes(fmt, matrix, scale), scale
    return first_rounding(matrix, scale).astype(np.int8), scale


def dequantize(fmt: Format, codes: I8, scale: F32) -> F32:
    """fl32(code * d), float32 [N, K]."""
    return codes.astype(np.float32) * scale[:, None]
