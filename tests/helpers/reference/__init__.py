"""The readable reference that the C library is compared with: quantize, dequantize, pack.

Arrays of codes and scales are plain: row-major, with the dtypes and shapes of ktconv.h. What the
library itself takes from NumPy is `ktconv.formats.reference`.
"""

from __future__ import annotations

from typing import Any

from ktconv.formats import Format
from ktconv.formats.reference import dequantize, scale_of
from ktconv.formats.reference import quantize as quantize_stored
from ktconv.system.arrays import F32, U8, Array

from . import integers
from .kt_layout import pack_codes
from .search import AMAX, Choice


def quantize(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[Array, Any]:
    """Codes and scales of a finite float32 [N, K] matrix; None for a format without scales.
    Another rule than "amax" is for formats with a quantizer in C."""
    if fmt.traits.max_level:
        return integers.quantize(fmt, matrix, choice)
    assert choice.rule == AMAX.rule
    return quantize_stored(fmt, matrix)


def quantize_pack(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[U8, F32]:
    """Payload uint8 and scales float32 [N] of one part's INT4 or INT8 matrix.

    For a backward matrix pass the transpose of the forward slice.
    """
    codes, scale = quantize(fmt, matrix, choice)
    return pack_codes(fmt, codes), scale
