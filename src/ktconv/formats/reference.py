"""The readable reference that faster code is compared with: quantize, dequantize, pack.

Arrays of codes and scales are plain: row-major, with the dtypes and shapes of ktconv.h.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ktconv.system.arrays import F32, U8, Array

from .decode import bf16_to_f32, f32_to_bf16
from .kt_layout import pack_codes
from .search import AMAX, Choice
from .table import Format


def quantize(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[Array, Any]:
    """Codes and scales of a finite float32 [N, K] matrix; None for a format without scales.
    Another rule than "amax" is for formats with a quantizer in C."""
    more = () if choice.rule == AMAX.rule else (choice,)
    codes, scale = _arithmetic(fmt).quantize(fmt, matrix, *more)
    return codes, scale


def scale_of(fmt: Format, amax: F32) -> F32:
    """Scales by "amax" of the largest weights of rows or groups; any shape."""
    scale: F32 = _arithmetic(fmt).scale_of(amax)
    return bf16_to_f32(f32_to_bf16(scale)) if fmt.scale_dtype == "bf16" else scale


def dequantize(fmt: Format, codes: Array, scale: Array | None) -> F32:
    """Weights float32 [N, K] of codes and scales."""
    weights: F32 = _arithmetic(fmt).dequantize(fmt, codes, scale)
    return weights


def quantize_pack(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[U8, F32]:
    """Payload uint8 and scales float32 [N] of one part's INT4 or INT8 matrix.

    For a backward matrix pass the transpose of the forward slice.
    """
    codes, scale = quantize(fmt, matrix, choice)
    return pack_codes(fmt, codes), scale


def _arithmetic(fmt: Format) -> Any:
    """The module next to this one with the rules of a format."""
    return import_module(f"ktconv.formats.{fmt.code}")
