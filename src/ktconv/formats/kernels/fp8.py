"""FP8 (E4M3) weights as the kernels read them (SPEC 8.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

BLOCK = 128


def pack(codes: U8) -> U8:
    """Packed bytes, flat, of row-major codes uint8 [N, K]; N % 32 == 0, K % 64 == 0."""
    rows, cols = codes.shape
    strip, half, quad, row, tile, pair, col = range(7)
    parts = codes.reshape(rows // 32, 2, 4, 4, cols // 32, 16, 2)
    packed: U8 = parts.transpose(strip, tile, pair, quad, half, row, col).reshape(-1)
    return packed


def pack_scale(scale: F32, rows: int, group: int) -> F32:
    """Packed scales, flat: of each row (group 0, `scale` [N]), or of each strip's blocks
    (group 128, `scale` [ceil(N / 128), K / 128])."""
    if group == 0:
        return scale
    strips = np.arange(rows // 32)
    return scale[strips * 32 // BLOCK].reshape(-1)


def scale_of_elements(scale: F32, rows: int, cols: int, group: int) -> F32:
    """The scale of each element, float32 [N, K], from unpacked scales."""
    if group == 0:
        return np.broadcast_to(scale[:, None], (rows, cols))
    n, k = np.arange(rows) // BLOCK, np.arange(cols) // BLOCK
    return scale[np.ix_(n, k)]
