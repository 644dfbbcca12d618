"""BF16 weights: no scales; as the kernels read them (SPEC 8.1)."""

from __future__ import annotations

from ktconv.system.arrays import F32, U16

from .decode import bf16_to_f32, f32_to_bf16
from .table import Format


def quantize(fmt: Format, matrix: F32) -> tuple[U16, None]:
    return f32_to_bf16(matrix), None


def dequantize(fmt: Format, codes: U16, scale: None) -> F32:
    return bf16_to_f32(codes)
