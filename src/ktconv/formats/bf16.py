"""BF16 weights: no scales; as the kernels read them (SPEC 8.1)."""

from __future__ import annotations

from ktconv.system.arrays import F32, U16

from .decode import bf16_to_f32, f32_to_bf16
from .table import Format


def quantize(fmt: Format, matrix: F32) -> tuple[U16, None]:
    return f32_to_bf16(matrix), None


def dequantize(fmt: Format, codes: U16, scale: None) -> F32:
    return bf16_to_f32(codes)


def pack(codes: U16) -> U16:
    """Packed bits, flat, of row-major bits uint16 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, pair, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 16, 2)
    packed: U16 = parts.transpose(strip, tile, half, pair, row, col).reshape(-1)
    return packed
