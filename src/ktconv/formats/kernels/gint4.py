"""Group INT4 weights as the kernels read them (SPEC 8.4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def pack(codes: U8) -> U8:
    """Packed bytes, flat, of codes + 8 (0..15) uint8 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, line, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 8, 4)
    ordered = parts.transpose(strip, tile, line, row, col, half).reshape(-1, 2)
    packed: U8 = ordered[:, 0] | ordered[:, 1] << np.uint8(4)
    return packed
