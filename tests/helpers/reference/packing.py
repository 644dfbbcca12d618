"""Packed bytes of kernel layouts: the order of codes and scales (SPEC 8)."""

from __future__ import annotations

import numpy as np

from ktconv.formats.fp8 import BLOCK
from ktconv.formats.groups import unpacked_nibbles
from ktconv.formats.nvfp4 import GROUP, TILE, parts_of
from ktconv.system.arrays import F32, U8, U16


def bf16(codes: U16) -> U16:
    """Packed bits, flat, of row-major bits uint16 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, pair, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 16, 2)
    packed: U16 = parts.transpose(strip, tile, half, pair, row, col).reshape(-1)
    return packed


def fp8(codes: U8) -> U8:
    """Packed bytes, flat, of row-major codes uint8 [N, K]; N % 32 == 0, K % 64 == 0."""
    rows, cols = codes.shape
    strip, half, quad, row, tile, pair, col = range(7)
    parts = codes.reshape(rows // 32, 2, 4, 4, cols // 32, 16, 2)
    packed: U8 = parts.transpose(strip, tile, pair, quad, half, row, col).reshape(-1)
    return packed


def fp8_scale(scale: F32, rows: int, group: int) -> F32:
    """Packed scales, flat: of each row (group 0, `scale` [N]), or of each strip's blocks
    (group 128, `scale` [ceil(N / 128), K / 128])."""
    if group == 0:
        return scale
    strips = np.arange(rows // 32)
    return scale[strips * 32 // BLOCK].reshape(-1)


def gint4(codes: U8) -> U8:
    """Packed bytes, flat, of codes + 8 (0..15) uint8 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, line, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 8, 4)
    ordered = parts.transpose(strip, tile, line, row, col, half).reshape(-1, 2)
    packed: U8 = ordered[:, 0] | ordered[:, 1] << np.uint8(4)
    return packed


def gint8(codes: U8) -> U8:
    """Packed bytes, flat, of codes + 128 uint8 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, pair, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 8, 4)
    return np.ascontiguousarray(parts.transpose(strip, tile, pair, half, row, col)).reshape(-1)


def mxfp4(codes: U8) -> U8:
    """Packed bytes, flat, of codes 0..15 uint8 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, line, pair, col = range(7)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 8, 2, 2)
    words = parts.transpose(strip, tile, line, row, col, pair, half).reshape(-1, 4)
    low, high = words[:, 0] | words[:, 1] << 4, words[:, 2] | words[:, 3] << 4
    packed: U8 = np.stack([low, high], axis=1).reshape(-1).astype(np.uint8)
    return packed


def nvfp4(codes: U8) -> U8:
    """Packed bytes, flat, of codes 0..15 and E4M3 scales, as `formats.nvfp4.plain` has them."""
    found, inner = parts_of(codes)
    lines = mxfp4(unpacked_nibbles(found)).reshape(-1, TILE * TILE // 2)
    strips = inner.reshape(len(codes) // TILE, TILE, -1, TILE // GROUP)
    scales = strips.transpose(0, 2, 3, 1).reshape(len(lines), -1)
    packed: U8 = np.concatenate([lines, scales], axis=1).reshape(-1)
    return packed
