"""Scales per group of columns, as MXFP4 and group INT4 pack them (SPEC 8.3, 8.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
U8 = NDArray[np.uint8]


def pack_scale(scale: Array) -> Array:
    """Flat, of row-major scales [N, groups]: strips, groups, the 32 rows of the strip."""
    rows, groups = scale.shape
    packed: Array = scale.reshape(rows // 32, 32, groups).transpose(0, 2, 1).reshape(-1)
    return packed


def nibbles(codes: U8) -> U8:
    """Codes 0..15 [N, K] as checkpoints store them: [N, K / 2], even columns low."""
    packed: U8 = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return packed
