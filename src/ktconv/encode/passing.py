"""Matrices of a source that have a format already: their codes and scales are kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktconv import native
from ktconv.checkpoint import BlockGrid, ExpertMatrix, MoELayer
from ktconv.checkpoint.elements import F4_E2M1, F8_E4M3, I4, I8, STREAMS, U4_AWQ
from ktconv.formats.decode import E4M3FN_VALUES, f32_to_bf16
from ktconv.reading.matrices import MatrixReader, Scales
from ktconv.system.arrays import U8, Array
from ktconv.targets.encoded.layouts.words import AWQ
from ktconv.targets.encoded.scheme import Scheme

# By kind of number: elements whose bytes are the codes, but for bits that are turned.
_CODES = {
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
    if matrix.element not in _CODES.get(row.kind, {}):
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


def awq_codes(source: MatrixReader, chunk: range, stored: U8, groups: int) -> U8:
    """Codes of AWQ, 0 to 15, as kt_encode leaves those of INT4: numbers without scales, which the
    reader puts in order."""
    cols = source.matrix.cols
    ones = Scales(np.ones((source.matrix.rows, groups), np.float32))
    levels = native.decode(source.view(chunk, ones, stored, 0, cols)).astype(np.uint8)
    codes: U8 = (levels[:, 0::2] | levels[:, 1::2] << np.uint8(4)).reshape(-1)
    return codes


def kept_codes(scheme: Scheme, matrix: ExpertMatrix, stored: U8) -> U8:
    """Codes of rows as `MatrixReader.read` leaves them."""
    turned = _CODES[scheme.row.kind][matrix.element]
    return stored ^ np.uint8(turned) if turned else stored


def kept_scales(scheme: Scheme, source: MatrixReader, half: bool) -> tuple[Array, float]:
    """Scales as kt_encode would leave them, and the second scale as it is stored (0: none)."""
    kind = scheme.row.kind
    if kind == "nvfp4":
        blocks, factor, divides = source.load_levels()
        codes = np.searchsorted(E4M3FN_VALUES[:127], blocks).astype(np.uint8)
        return codes, factor if divides == scheme.layout.divides else float(np.float32(1 / factor))
    found = source.load_scales()
    assert found is not None
    scales = found.scale
    if scheme.row.is_int:
        stored = scales.astype("<f2").view(np.uint16) if half else f32_to_bf16(scales)
        return np.ascontiguousarray(stored), 0.0
    if kind == "fp8":
        return np.ascontiguousarray(scales), 0.0
    bits = scales.view(np.uint32)  # not by value, where denormals may count as zero
    return np.where(bits == 1 << 22, 0, bits >> 23).astype(np.uint8), 0.0
