"""Scales of packed matrices as NumPy arrays: order and values, not by the C library's path."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, Array

from .decode import bf16_to_f32, e8m0_to_f32
from .groups import pack_scale, unpack_scale
from .table import SMALLEST_NORMAL, Format


def ordered(fmt: Format, packed: Array, rows: int, cols: int) -> Array:
    """Packed scales (bytes) of a [rows, cols] matrix as [rows, 1] or [rows, cols / group], in the
    dtype that stores them. Not for scales that several rows share."""
    assert fmt.traits.scale_rows == 1
    scales = packed.view(fmt.layout.scale_array)
    if fmt.group:
        return unpack_scale(scales, rows, cols // fmt.group)
    return scales.reshape(rows, 1)


def placed(fmt: Format, scales: Array) -> Array:
    """The inverse of `ordered`: bytes."""
    packed = pack_scale(scales) if fmt.group else np.ascontiguousarray(scales).reshape(-1)
    return packed.view(np.uint8)


def values(fmt: Format, stored: Array) -> F32:
    """Scales as float32, exact; any shape."""
    if fmt.scale_dtype == "f32":
        return stored.view(np.float32)
    return bf16_to_f32(stored) if fmt.scale_dtype == "bf16" else e8m0_to_f32(stored)


def error_bound(fmt: Format, scale: Array, slack: float = 0.0, rule: str = "amax") -> Array:
    """Largest |x - dequantized| in weight units that the rules allow under float32 scales, with
    `slack` steps on top, in binary64. For a scale of zero that is what amax stays below."""
    steps = (fmt.error_steps(rule) + slack) * fmt.traits.scale_units
    bound = np.multiply(scale, steps, dtype=np.float64)
    return np.where(scale == 0, fmt.smallest_amax, np.maximum(bound, SMALLEST_NORMAL))
