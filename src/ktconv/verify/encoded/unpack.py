"""Numbers of the pack-quantized format, by its published layout, without its code.

A row of levels is stored in int32 words, little-endian, 32 / bits levels each, the first column in
the lowest bits; level q is stored as q + 2^(bits - 1). The value of a weight is its level times the
scale of its group, or of its row.
"""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, I8, U8, Array

SCALE_DTYPES = ("BF16", "F16", "F32")


def levels(packed: U8, rows: int, cols: int, bits: int) -> I8:
    """Levels [rows, cols] from the bytes of weight_packed, rows one after the other.

    Raises ValueError if there are not as many bytes as that takes.
    """
    words = -(-cols * bits // 32)
    if packed.size != rows * words * 4:
        raise ValueError(f"{packed.size} bytes are not {rows} rows of {words} words")
    data = packed.reshape(rows, words * 4)
    if bits == 8:
        found: I8 = (data[:, :cols] ^ np.uint8(128)).view(
            np.int8
        )  # q + 128 with its top bit turned
        return found
    stored = np.empty((rows, words * 8), np.uint8)
    np.bitwise_and(data, 15, out=stored[:, 0::2])
    np.right_shift(data, 4, out=stored[:, 1::2])
    found = stored[:, :cols].view(np.int8)
    found -= np.int8(8)
    return found


def values(level: I8, scale: F32) -> F32:
    """Weights [rows, cols] of levels [rows, cols] and scales [rows, groups]. Exact: a level of 8
    bits times a scale with at most 16 significant bits has no more than the 24 of float32."""
    found: F32 = level.astype(np.float32)
    grouped: Array = found.reshape(*scale.shape, -1)
    grouped *= scale[:, :, None]
    return found
