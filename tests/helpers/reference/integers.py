"""Codes and scales of INT4, INT8 and their group formats (SPEC 3, 8.4 and 8.5)."""

from __future__ import annotations

import numpy as np

from ktconv.formats import Format
from ktconv.formats.decode import f32_to_bf16
from ktconv.formats.groups import grouped, nibbles
from ktconv.formats.integers import scale_of
from ktconv.formats.scales import values
from ktconv.system.arrays import F32, I32, Array

from .rounding import first_rounding, row_amax
from .search import AMAX, Choice, nearest_codes, searched_row_scale, searched_scale


def quantize(fmt: Format, matrix: F32, choice: Choice = AMAX) -> tuple[Array, Array]:
    """Codes and scales of a finite [N, K] matrix: int8 [N, K] and float32 [N]; with groups uint8
    [N, K], or nibbles [N, K / 2], and float32 or bf16 [N, groups]."""
    if fmt.group:
        codes, stored = _quantized_groups(fmt, matrix, choice)
        biased = (codes + fmt.traits.code_bias).astype(np.uint8)
        return nibbles(biased) if fmt.traits.bits == 4 else biased, stored
    scale = scale_of(fmt, row_amax(matrix))
    if choice.rule != "amax":
        scale = searched_row_scale(fmt, matrix, scale, choice)
        return nearest_codes(fmt, matrix, scale), scale
    q = first_rounding(matrix, scale)
    return (second_rounding(q) if fmt.traits.bits == 4 else q).astype(np.int8), scale


def second_rounding(q: I32) -> I32:
    """c = sign(q) * floor((|q| + 8) / 16): ties away from zero, any shape (SPEC 3.4)."""
    c: I32 = np.sign(q) * ((np.abs(q) + 8) // 16)
    return c


def _quantized_groups(fmt: Format, matrix: F32, choice: Choice) -> tuple[Array, Array]:
    """Codes int32 [N, K], and scales as stored [N, groups]."""
    groups = grouped(matrix, fmt.group).reshape(-1, fmt.group)
    scale = scale_of(fmt, np.abs(groups).max(axis=1))
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
