"""Matrices of a source that have a format already, by their headers: codes and scales are kept."""

from __future__ import annotations

from collections.abc import Sequence

from ktconv.source import BlockGrid, ExpertMatrix, MoELayer
from ktconv.source.elements import F4_E2M1, F8_E4M3, I4, I8, STREAMS, U4_AWQ
from ktconv.targets.encoded.layouts.words import AWQ
from ktconv.targets.encoded.scheme import Scheme

# By kind of number: elements whose bytes are the codes, but for bits that are turned.
CODES = {
    "int4": {STREAMS[4]: 0, I4: 0x88},
    "int8": {STREAMS[8]: 0, I8: 0x80},
    "fp8": {F8_E4M3: 0},
    "mxfp4": {F4_E2M1: 0},
    "mxfp8": {F8_E4M3: 0},
    "nvfp4": {F4_E2M1: 0},
}
# What scales can be stored as, so that the format has the same numbers.
_SCALES = {
    "fp8": ("F32", "BF16", "F16", "E8M0"),
    "mxfp4": ("E8M0",),
    "mxfp8": ("E8M0",),
    "nvfp4": ("E4M3",),
}


def is_kept(scheme: Scheme, matrix: ExpertMatrix, half: bool) -> bool:
    """Whether the codes and scales of the source can be those of the output. `half`: see
    `Scheme.encoding`."""
    found, row = matrix.quantization, scheme.row
    if row.layout is AWQ:
        return _awq_group(matrix) == scheme.group_size
    if found is None or found.groups is not None or matrix.col_stride != 1:
        return False
    if matrix.element not in CODES.get(row.kind, {}):
        return False
    zero = matrix.element.integer_zero
    if row.is_int and found.zero_point not in ((None, 0) if zero == 0 else (zero,)):
        return False
    grid, cols = found.scale, matrix.cols
    if row.is_int:
        numbers: tuple[str, ...] = ("F16",) if scheme.is_half(half) else ("BF16",)
    else:
        numbers = _SCALES[row.kind]
    width = scheme.group_size if scheme.group_size > 0 else cols
    whole = grid.row_origin % grid.block_rows == 0 and grid.col_origin % grid.block_cols == 0
    return (
        whole
        and grid.number in numbers
        and (grid.outer is not None) == (row.kind == "nvfp4")
        and grid.block_rows == row.block
        and (grid.block_cols == width or grid.block_cols >= cols == width)
    )


def awq_group(layers: Sequence[MoELayer]) -> int | None:
    """The group size of experts that are all AWQ with float16 scales; None for others."""
    sizes = {_awq_group(matrix) for layer in layers for matrix in layer.kinds}
    return sizes.pop() if len(sizes) == 1 else None


def _awq_group(matrix: ExpertMatrix) -> int | None:
    found = matrix.quantization
    if matrix.element != U4_AWQ or found is None or found.groups is not None:
        return None
    grid, zero = found.scale, found.zero_point
    whole = not (grid.row_origin or grid.col_origin) and grid.block_rows == 1
    sound = whole and grid.number == "F16" and isinstance(zero, BlockGrid)
    return grid.block_cols if sound and grid.block_cols < matrix.cols else None
