"""MXFP4 weights: E2M1 codes, a power of two per group of 32 columns (SPEC 8.3)."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8

from .decode import e8m0_to_f32
from .groups import grouped, nibbles, unpacked_nibbles
from .table import Format

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
LARGEST_EXPONENT = 2


def quantize(fmt: Format, matrix: F32) -> tuple[U8, U8]:
    """OCP Microscaling: nibbles [N, K / 2], and exponents [N, groups] of the scales, which are the
    power of two of a group's largest magnitude, less 2."""
    groups = grouped(matrix, fmt.group)
    largest = np.maximum(np.abs(groups).max(axis=2), np.float32(2.0**-120))
    exponent = np.floor(np.log2(largest)).astype(np.int32) - LARGEST_EXPONENT
    sizes = np.abs(groups) / np.ldexp(np.float32(1), exponent)[..., None]
    codes = np.zeros(groups.shape, np.uint8)
    for middle in (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2:
        codes += sizes > middle
    signed = (codes | (np.signbit(groups) << 3)).astype(np.uint8).reshape(matrix.shape)
    return nibbles(signed), (exponent + 127).astype(np.uint8)


def dequantize(fmt: Format, codes: U8, scale: U8) -> F32:
    """E2M1 * 2^(scale - 127), float32 [N, K]."""
    levels: F32 = VALUES[unpacked_nibbles(codes)]
    return levels * np.repeat(e8m0_to_f32(scale), fmt.group, axis=1)
