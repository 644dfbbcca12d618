"""FP8 (E4M3) weights, one float32 scale per row or block of 128 x 128 (SPEC 8.2)."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8

from .decode import E4M3FN_VALUES
from .table import Format

BLOCK = 128
LARGEST = 448.0


def quantize(fmt: Format, matrix: F32) -> tuple[U8, F32]:
    """Codes uint8 [N, K] nearest to x / scale, and scales amax / 448, at least 1e-30 / 448:
    float32 [N], or [ceil(N / 128), K / 128]."""
    rows, cols = matrix.shape
    block = (BLOCK, BLOCK) if fmt.group else (1, cols)
    firsts = [np.arange(0, size, step) for size, step in zip(matrix.shape, block, strict=True)]
    largest = np.maximum.reduceat(np.abs(matrix), firsts[0], axis=0)
    largest = np.maximum.reduceat(largest, firsts[1], axis=1)
    scale = (np.maximum(largest, 1e-30) / LARGEST).astype(np.float32)
    spread = scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :cols]
    codes = nearest((np.abs(matrix) / spread).astype(np.float32, copy=False))
    signed = (codes | (np.signbit(matrix) << 7)).astype(np.uint8)
    return signed, scale if fmt.group else scale[:, 0]


def dequantize(fmt: Format, codes: U8, scale: F32) -> F32:
    """fl32(E4M3 * scale), float32 [N, K]."""
    rows, cols = codes.shape
    restored: F32 = E4M3FN_VALUES[codes] * scale_of_elements(scale, rows, cols, fmt.group)
    return restored


def nearest(sizes: F32) -> U8:
    """Nearest codes of magnitudes up to LARGEST, ties to even: float32 has the same fields, 20
    bits further up and with a bias larger by 120; below 2^-6 codes are multiples of 2^-9."""
    bits = sizes.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)
    small = np.rint(np.minimum(sizes, 1) * np.float32(512)).astype(np.uint32)
    codes = np.where(sizes < np.float32(2.0**-6), small, rounded - np.uint32(960))
    capped: U8 = np.minimum(codes, np.uint32(0x7E)).astype(np.uint8)
    return capped


def scale_of_elements(scale: F32, rows: int, cols: int, group: int) -> F32:
    """The scale of each element, float32 [N, K], from unpacked scales."""
    if group == 0:
        return np.broadcast_to(scale[:, None], (rows, cols))
    n, k = np.arange(rows) // BLOCK, np.arange(cols) // BLOCK
    return scale[np.ix_(n, k)]
