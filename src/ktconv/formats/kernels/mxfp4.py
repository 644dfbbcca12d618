"""MXFP4 weights as the kernels read them (SPEC 8.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def pack(codes: U8) -> U8:
    """Packed bytes, flat, of codes 0..15 uint8 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, line, pair, col = range(7)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 8, 2, 2)
    words = parts.transpose(strip, tile, line, row, col, pair, half).reshape(-1, 4)
    low, high = words[:, 0] | words[:, 1] << 4, words[:, 2] | words[:, 3] << 4
    packed: U8 = np.stack([low, high], axis=1).reshape(-1).astype(np.uint8)
    return packed
