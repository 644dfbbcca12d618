"""Quantizing (choosing codes and scales) and packing (placing their bytes)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import (
    Array,
    aligned_bytes,
    aligned_to,
    byte_pointer,
    check,
    expect_bytes,
)
from ktconv.native.layouts import Layout, expect_codes, expect_scale, layout_of, packed_size
from ktconv.native.rules import Choice, choice_of
from ktconv.native.source import Matrix


def scratch_size(cols: int) -> int:
    """Bytes of scratch for matrices of up to `cols` columns."""
    return int(lib.kt_scratch_size(cols))


def new_scratch(cols: int) -> Array:
    """Scratch for matrices of up to `cols` columns; one per thread."""
    return np.empty(scratch_size(cols), np.uint8)


def quantize(
    layout: Layout | str, matrix: Matrix, choice: Choice | None = None
) -> tuple[Array, Array]:
    """Plain codes and scales, as `pack_weight` takes them; None: by the largest magnitude.

    Raises NonFiniteError with the first NaN or Inf, ValueError for a layout without a quantizer.
    """
    layout = layout_of(layout)
    shape = (matrix.rows, matrix.cols)
    codes = np.empty(layout.code_shape(*shape), layout.code_array)
    scale = np.empty(layout.scale_shape(*shape), layout.scale_array)
    scratch, bad = new_scratch(matrix.cols), ffi.new("kt_position *")
    status = lib.kt_quantize(
        layout.c(),
        matrix.c,
        choice_of(choice, matrix.cols),
        ffi.from_buffer(codes),
        ffi.from_buffer(scale),
        ffi.from_buffer(scratch),
        scratch.nbytes,
        bad,
    )
    check(status, bad)
    return codes, scale


def pack(layout: Layout | str, codes: Array) -> Array:
    """Packed bytes (uint8, 1-D) of plain codes alone, which may be out of their range."""
    layout = layout_of(layout)
    codes = np.ascontiguousarray(codes, layout.code_array)
    rows, cols = codes.shape[0], layout.cols_of(codes.shape[1])
    packed = np.empty(packed_size(layout, rows, cols), np.uint8)
    source = ffi.from_buffer(codes)
    check(lib.kt_pack(layout.c(), rows, cols, source, ffi.NULL, byte_pointer(packed), ffi.NULL))
    return packed


def unpack(layout: Layout | str, packed: Array, rows: int, cols: int) -> Array:
    """Plain codes of packed bytes."""
    layout = layout_of(layout)
    expect_bytes("packed", packed, packed_size(layout, rows, cols))
    codes = np.empty(layout.code_shape(rows, cols), layout.code_array)
    target = ffi.from_buffer(codes)
    check(lib.kt_unpack(layout.c(), rows, cols, byte_pointer(packed), ffi.NULL, target, ffi.NULL))
    return codes


def _check_range(layout: Layout, codes: Array) -> None:
    """Check that codes have no more bits than packed ones, and no value that no code has."""
    if layout.code_array == np.int8:
        largest = layout.traits.max_level
        if codes.max() > largest or codes.min() < -largest:
            raise ValueError(f"{layout.format} codes must be {-largest}..{largest}")


def pack_weight(
    layout: Layout, rows: int, cols: int, codes: Array, scale: Array | None, packed: Array
) -> Array:
    """Packs plain codes into `packed` (uint8); returns the packed scales (uint8).

    `codes` and `scale` have the dtypes and shapes that kt_pack wants, whoever chose them. Raises
    ValueError for others, for a shape that the layout does not allow, for INT8 and INT4 codes out
    of their range, and for scales that are not finite.
    """
    size = packed_size(layout, rows, cols)
    codes = np.ascontiguousarray(codes)
    scale = None if scale is None else np.ascontiguousarray(scale)
    expect_codes(layout, rows, cols, codes)
    _check_range(layout, codes)
    expect_scale(layout, rows, cols, scale)
    expect_bytes("packed", packed, size)
    packed_scale = aligned_bytes(max(1, layout.scale_size(rows, cols)))
    status = lib.kt_pack(
        layout.c(),
        rows,
        cols,
        ffi.from_buffer(codes),
        ffi.NULL if scale is None else ffi.from_buffer(scale),
        ffi.from_buffer(packed, require_writable=True),
        ffi.from_buffer(packed_scale, require_writable=True),
    )
    if status == lib.KT_ERR_NONFINITE:
        raise ValueError("a scale or a code is NaN or infinite")
    check(status)
    return packed_scale


def unpack_weight(
    layout: Layout, rows: int, cols: int, packed: Array, packed_scale: Array | None
) -> tuple[Array, Array | None]:
    """The inverse of `pack_weight`: plain codes and scales."""
    codes = unpack(layout, packed, rows, cols)
    if layout.scale_dtype == "none":
        return codes, None
    if packed_scale is None:
        raise ValueError(f"{layout.format} needs scales")
    expect_bytes("scale", packed_scale, layout.scale_size(rows, cols))
    scale = np.empty(layout.scale_shape(rows, cols), layout.scale_array)
    given = aligned_to(packed_scale, layout.scale_array.itemsize)
    arguments: tuple[Any, ...] = (byte_pointer(packed), ffi.from_buffer(given))
    target = ffi.from_buffer(codes), ffi.from_buffer(scale)
    check(lib.kt_unpack(layout.c(), rows, cols, *arguments, *target))
    return codes, scale


def quantize_pack(
    layout: Layout | str,
    matrix: Matrix,
    packed: Array,
    scale: Array,
    scratch: Array | None = None,
    choice: Choice | None = None,
) -> None:
    """Quantizes and packs in one pass, into `packed` (uint8) and `scale` (packed scales), as
    `choice` says, or by the largest magnitude.

    Raises NonFiniteError with the first NaN or Inf.
    """
    layout = layout_of(layout)
    expect_bytes("packed", packed, packed_size(layout, matrix.rows, matrix.cols))
    expect_bytes("scale", scale, layout.scale_size(matrix.rows, matrix.cols))
    scratch = new_scratch(matrix.cols) if scratch is None else scratch
    aligned = aligned_to(scale, layout.scale_array.itemsize)
    bad = ffi.new("kt_position *")
    status = lib.kt_quantize_pack(
        layout.c(),
        matrix.c,
        choice_of(choice, matrix.cols),
        byte_pointer(packed, writable=True),
        ffi.from_buffer(aligned, require_writable=True),
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
        bad,
    )
    check(status, bad)
    if aligned is not scale:
        np.copyto(scale, aligned)
