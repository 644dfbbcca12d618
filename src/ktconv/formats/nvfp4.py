"""NVFP4 weights: E2M1 codes, an E4M3 scale per 16 columns, a float32 per row (docs/formats.md 8.6).

A row's plain codes are blocks of 18 bytes for 32 columns: the nibbles, then two E4M3 scales.
"""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8

from .decode import E4M3FN_VALUES
from .fp8 import nearest
from .groups import nibbles, unpacked_nibbles
from .mxfp4 import MAGNITUDES, VALUES
from .table import Format

GROUP = 16
TILE = 32  # columns of a block
BLOCK = TILE // 2 + TILE // GROUP
LARGEST = 6.0 * 448.0


def quantize(fmt: Format, matrix: F32) -> tuple[U8, F32]:
    """Plain codes uint8 [N, K / 32 * 18] and scales [N], amax of a row / (6 * 448); a group's scale
    is the E4M3 nearest to amax / 6 in units of the row's, at least 2^-9, codes are the nearest."""
    scale = np.maximum(np.abs(matrix).max(axis=1), np.float32(1e-30)) / np.float32(LARGEST)
    groups = (matrix / scale[:, None]).reshape(len(matrix), -1, GROUP)
    inner = np.maximum(nearest((np.abs(groups).max(axis=2) / 6).astype(np.float32)), np.uint8(1))
    sizes = np.abs(groups) / E4M3FN_VALUES[inner][..., None]
    codes = np.zeros(groups.shape, np.uint8)
    for middle in (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2:
        codes += sizes > middle
    signed = (codes | (np.signbit(groups) << 3)).astype(np.uint8).reshape(matrix.shape)
    return plain(nibbles(signed), inner), scale


def plain(codes: U8, inner: U8) -> U8:
    """Nibbles [N, K / 2] and E4M3 scales [N, K / 16] as blocks."""
    rows = len(codes)
    parts = codes.reshape(rows, -1, TILE // 2), inner.reshape(rows, -1, TILE // GROUP)
    joined: U8 = np.concatenate(parts, axis=2).reshape(rows, -1)
    return joined


def parts_of(codes: U8) -> tuple[U8, U8]:
    """The inverse of `plain`."""
    blocks = codes.reshape(len(codes), -1, BLOCK)
    halves = blocks[..., : TILE // 2], blocks[..., TILE // 2 :]
    found, inner = (half.reshape(len(codes), -1) for half in halves)
    return found, inner


def dequantize(fmt: Format, codes: U8, scale: F32) -> F32:
    """fl32(E2M1 * E4M3 * scale), float32 [N, K]."""
    found, inner = parts_of(codes)
    numbers: F32 = VALUES[unpacked_nibbles(found)] * np.repeat(E4M3FN_VALUES[inner], GROUP, axis=1)
    return numbers * scale[:, None]
