"""BF16 weights as the kernels read them (SPEC 8.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U16 = NDArray[np.uint16]


def pack(codes: U16) -> U16:
    """Packed bits, flat, of row-major bits uint16 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, pair, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 16, 2)
    packed: U16 = parts.transpose(strip, tile, half, pair, row, col).reshape(-1)
    return packed
