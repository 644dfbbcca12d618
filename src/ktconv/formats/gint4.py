"""Group INT4 weights: codes -8..7, a scale per group of columns (SPEC 8.4)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ktconv.system.arrays import F32, U8, Array

from .decode import f32_to_bf16
from .groups import grouped, nibbles, unpacked_nibbles
from .rounding import first_rounding, ftz
from .scales import values
from .search import AMAX, Choice, nearest_codes, searched_scale
from .table import Format

BIAS = 8


def scale_of(amax: F32) -> F32:
    """d = ftz(fl32(fl64(amax / 7))), before it is rounded to the dtype of scales (SPEC 8.4)."""
    return ftz((amax.astype(np.float64) / 7).astype(np.float32))


def quantize(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[U8, Array]:
    """Nibbles of code + 8 [N, K / 2], codes -7..7, and scales float32 or bf16 [N, groups]."""
    codes, stored = quantized_groups(fmt, matrix, choice, scale_of)
    return nibbles((codes + BIAS).astype(np.uint8)), stored


def quantized_groups(
    fmt: Format, matrix: F32, choice: Choice, rule: Callable[[F32], F32]
) -> tuple[Array, Array]:
    """Codes int32 [N, K] and scales as stored [N, groups]; `rule`: the scales of largest
    magnitudes."""
    groups = grouped(matrix, fmt.group).reshape(-1, fmt.group)
    scale = rule(np.abs(groups).max(axis=1))
    stored = f32_to_bf16(scale) if fmt.scale_dtype == "bf16" else scale
    codes = first_rounding(groups, values(fmt, stored))
    if choice.rule != "amax":
        importance = None if choice.importance is None else _grouped_again(choice, fmt, len(matrix))
        found = searched_scale(fmt, groups, values(fmt, stored), importance)
        stored = f32_to_bf16(found) if fmt.scale_dtype == "bf16" else found
        codes = nearest_codes(fmt, groups, found).astype(np.int32)
    return codes.reshape(matrix.shape), stored.reshape(len(matrix), -1)


def _grouped_again(choice: Choice, fmt: Format, rows: int) -> F32:
    """Importance [K] as [N * groups, group], next to the groups of a matrix."""
    assert choice.importance is not None
    repeated: F32 = np.tile(choice.importance.reshape(-1, fmt.group), (rows, 1))
    return repeated


def dequantize(fmt: Format, codes: U8, scale: Array) -> F32:
    """fl32(code * d), float32 [N, K]."""
    levels = unpacked_nibbles(codes).astype(np.float32) - np.float32(BIAS)
    restored: F32 = levels * np.repeat(values(fmt, scale), fmt.group, axis=1)
    return restored


def pack(codes: U8) -> U8:
    """Packed bytes, flat, of codes + 8 (0..15) uint8 [N, K]; N % 32 == 0, K % 32 == 0."""
    rows, cols = codes.shape
    strip, half, row, tile, line, col = range(6)
    parts = codes.reshape(rows // 32, 2, 16, cols // 32, 8, 4)
    ordered = parts.transpose(strip, tile, line, row, col, half).reshape(-1, 2)
    packed: U8 = ordered[:, 0] | ordered[:, 1] << np.uint8(4)
    return packed
