"""Group INT8 weights: codes -128..127, a scale per group of columns (docs/formats.md 8.5)."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8, Array

from .gint4 import quantized_groups
from .int8 import scale_of
from .scales import values
from .search import AMAX, Choice
from .table import Format

BIAS = 128
__all__ = ["dequantize", "pack", "quantize", "scale_of"]  # the scale is that of INT8's rows


def quantize(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[U8, Array]:
    """code + 128 uint8 [N, K], codes -127..127, and scales float32 or bf16 [N, groups]."""
    codes, stored = quantized_groups(fmt, matrix, choice, scale_of)
    return (codes + BIAS).astype(np.uint8), stored


def dequantize(fmt: Format, codes: U8, scale: Array) -> F32:
    """fl32(code * d), float32 [N, K]."""
    levels = codes.astype(np.float32) - np.float32(BIAS)
    restored: F32 = levels * np.repeat(values(fmt, scale), fmt.group, axis=1)
    return restored


def pack(codes: U8) -> U8:
    """Packed bytes, flat, of codes + 128 uint8 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, pair, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 8, 4)
    return np.ascontiguousarray(parts.transpose(strip, tile, pair, half, row, col)).reshape(-1)
