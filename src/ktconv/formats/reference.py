"""Arithmetic of weight formats in NumPy: quantize, dequantize.

Arrays of codes and scales are plain: row-major, with the dtypes and shapes of ktconv.h.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ktconv.system.arrays import F32, Array

from . import integers
from .search import storable
from .table import Format


def quantize(fmt: Format, matrix: F32) -> tuple[Array, Any]:
    """Codes and scales of a finite float32 [N, K] matrix, of a format without a quantizer in C;
    None for one without scales."""
    codes, scale = _arithmetic(fmt).quantize(fmt, matrix)
    return codes, scale


def scale_of(fmt: Format, amax: F32) -> F32:
    """Scales by "amax" of the largest weights of rows or groups, of a format with a quantizer in C;
    any shape."""
    return storable(fmt, integers.scale_of(fmt, amax))


def dequantize(fmt: Format, codes: Array, scale: Array | None) -> F32:
    """Weights float32 [N, K] of codes and scales."""
    weights: F32 = _arithmetic(fmt).dequantize(fmt, codes, scale)
    return weights


def _arithmetic(fmt: Format) -> Any:
    """The module next to this one with the rules of a format."""
    return integers if fmt.traits.max_level else import_module(f"ktconv.formats.{fmt.code}")
