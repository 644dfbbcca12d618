"""MXFP8 weights: E4M3 codes, a power of two per group of 32 columns (SPEC 8.7)."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8

from .decode import E4M3FN_VALUES, e8m0_to_f32
from .fp8 import LARGEST, nearest
from .groups import grouped
from .table import Format

LARGEST_EXPONENT = 8
SMALLEST = 2.0**-119  # of a group's magnitude, that is not under the scale 2^-127


def quantize(fmt: Format, matrix: F32) -> tuple[U8, U8]:
    """The numbers of `kt_encode` (SPEC 10): exponents [N, groups] of scales, each the power of two
    of a group's largest magnitude, less 8, or one more where that is 1.75 times its power or more;
    codes [N, K] nearest to x / scale, cut to 448."""
    groups = grouped(matrix, fmt.group)
    largest = np.maximum(np.abs(groups).max(axis=2), np.float32(SMALLEST))
    fraction, power = np.frexp(largest)  # 1/2 <= fraction < 1
    exponent = power - 1 - LARGEST_EXPONENT + (fraction >= np.float32(0.875))
    sizes = np.ldexp(np.abs(groups), -exponent[..., None]).astype(np.float32, copy=False)
    codes = nearest(np.minimum(sizes, np.float32(LARGEST)))
    signed = (codes | (np.signbit(groups) << 7)).astype(np.uint8).reshape(matrix.shape)
    return signed, (exponent + 127).astype(np.uint8)


def dequantize(fmt: Format, codes: U8, scale: U8) -> F32:
    """E4M3 * 2^(scale - 127), float32 [N, K]."""
    restored: F32 = E4M3FN_VALUES[codes] * np.repeat(e8m0_to_f32(scale), fmt.group, axis=1)
    return restored
