"""Scales per group of columns, as MXFP4 and group INT4 pack them (SPEC 8.3, 8.4)."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import U8, Array


def pack_scale(scale: Array) -> Array:
    """Flat, of row-major scales [N, groups]: strips, groups, the 32 rows of the strip."""
    rows, groups = scale.shape
    packed: Array = scale.reshape(rows // 32, 32, groups).transpose(0, 2, 1).reshape(-1)
    return packed


def unpack_scale(packed: Array, rows: int, groups: int) -> Array:
    """The inverse of `pack_scale`."""
    scale: Array = packed.reshape(rows // 32, groups, 32).transpose(0, 2, 1).reshape(rows, groups)
    return scale


def nibbles(codes: U8) -> U8:
    """Codes 0..15 [N, K] as checkpoints store them: [N, K / 2], even columns low."""
    packed: U8 = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return packed


def unpacked_nibbles(stored: U8) -> U8:
    """The inverse of `nibbles`."""
    codes: U8 = np.stack([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1)
    return codes


def grouped(matrix: Array, group: int) -> Array:
    """[N, K] as [N, groups, group]."""
    rows, cols = matrix.shape
    return matrix.reshape(rows, cols // group, group)
