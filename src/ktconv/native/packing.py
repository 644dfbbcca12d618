"""Quantizing and packing into the INT8 and INT4 formats."""

from __future__ import annotations

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, aligned_floats, byte_pointer, check, expect_bytes
from ktconv.native.source import Matrix

FORMATS: dict[str, int] = {"int8": lib.KT_INT8, "int4": lib.KT_INT4}


def packed_size(format: str, rows: int, cols: int) -> int:
    """Bytes of a packed matrix; ValueError if the format cannot hold the shape."""
    size = int(lib.kt_packed_size(FORMATS[format], rows, cols))
    if not size:
        raise ValueError(f"{format} cannot hold a matrix of [{rows}, {cols}]")
    return size


def scratch_size(cols: int) -> int:
    """Bytes of scratch for matrices of up to `cols` columns."""
    return int(lib.kt_scratch_size(cols))


def new_scratch(cols: int) -> Array:
    """Scratch for matrices of up to `cols` columns; one per thread."""
    return np.empty(scratch_size(cols), np.uint8)


def quantize(format: str, matrix: Matrix) -> tuple[Array, Array]:
    """Codes int8 [rows, cols] and scales float32 [rows]."""
    codes = np.empty((matrix.rows, matrix.cols), np.int8)
    scale = np.empty(matrix.rows, np.float32)
    scratch, bad = new_scratch(matrix.cols), ffi.new("kt_position *")
    status = lib.kt_quantize(
        FORMATS[format],
        matrix.c,
        ffi.cast("int8_t *", ffi.from_buffer(codes)),
        ffi.cast("float *", ffi.from_buffer(scale)),
        ffi.from_buffer(scratch),
        scratch.nbytes,
        bad,
    )
    check(status, bad)
    return codes, scale


def pack(format: str, codes: Array) -> Array:
    """Packed bytes (uint8, 1-D) of int8 codes [rows, cols]."""
    codes = np.ascontiguousarray(codes, np.int8)
    packed = np.empty(packed_size(format, *codes.shape), np.uint8)
    source = ffi.cast("int8_t *", ffi.from_buffer(codes))
    check(lib.kt_pack(FORMATS[format], source, *codes.shape, byte_pointer(packed)))
    return packed


def unpack(format: str, packed: Array, rows: int, cols: int) -> Array:
    """Codes int8 [rows, cols] of packed bytes."""
    expect_bytes("packed", packed, packed_size(format, rows, cols))
    codes = np.empty((rows, cols), np.int8)
    target = ffi.cast("int8_t *", ffi.from_buffer(codes))
    check(lib.kt_unpack(FORMATS[format], byte_pointer(packed), rows, cols, target))
    return codes


def quantize_pack(
    format: str, matrix: Matrix, packed: Array, scale: Array, scratch: Array | None = None
) -> None:
    """Quantizes and packs in one pass, into `packed` (uint8) and `scale` (float32 [rows]).

    Raises NonFiniteError with the first NaN or Inf.
    """
    expect_bytes("packed", packed, packed_size(format, matrix.rows, matrix.cols))
    expect_bytes("scale", scale, 4 * matrix.rows)
    scratch = new_scratch(matrix.cols) if scratch is None else scratch
    floats = aligned_floats(scale)
    bad = ffi.new("kt_position *")
    status = lib.kt_quantize_pack(
        FORMATS[format],
        matrix.c,
        byte_pointer(packed, writable=True),
        ffi.cast("float *", ffi.from_buffer(floats, require_writable=True)),
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
        bad,
    )
    check(status, bad)
    if floats is not scale:
        np.copyto(scale, floats)
