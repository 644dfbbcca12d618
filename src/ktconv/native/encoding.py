"""Encodings of checkpoints: codes and scales as other engines load them."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, byte_pointer, check, expect_bytes
from ktconv.native.auditing import ByteSums
from ktconv.native.layouts import _names
from ktconv.native.packing import new_scratch
from ktconv.native.source import Matrix

ENCODINGS = _names("kt_encode_kind", "KT_ENCODE_")
_SCALES: dict[int, type[np.generic]] = {4: np.float32, 2: np.uint16, 1: np.uint8, 0: np.uint8}


class Encoding(Struct, frozen=True):
    """A kind of ENCODINGS, the columns that share a scale (0: all of a row) and, of integers,
    whether weights and scales are binary16, and scales searched; see kt_encoding."""

    kind: str
    group: int = 0
    half: bool = False
    search: bool = False

    def code_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of codes as bytes. ValueError for a shape that the encoding does not have, as
        below."""
        return rows, int(_sizes(self, rows, cols).row_size)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        sizes = _sizes(self, rows, cols)
        return int(sizes.scale_rows), int(sizes.scale_cols)

    def scale_array(self, rows: int, cols: int) -> type[np.generic]:
        """bf16 and f16 as uint16; E4M3 and UE8M0 as uint8."""
        return _SCALES[int(_sizes(self, rows, cols).scale_size)]


def _fields(encoding: Encoding) -> tuple[int, int, bool, bool]:
    return ENCODINGS[encoding.kind], encoding.group, encoding.half, encoding.search


@cache
def _struct(encoding: Encoding) -> Any:
    return ffi.new("kt_encoding *", list(_fields(encoding)))


@cache
def _sizes(encoding: Encoding, rows: int, cols: int) -> Any:
    sizes = ffi.new("kt_encoded *")
    check(lib.kt_encoded_sizes(_struct(encoding), rows, cols, sizes))
    return sizes


def encode(
    encoding: Encoding,
    matrix: Matrix,
    tensor_scale: float = 0.0,
    codes: Array | None = None,
    scales: Array | None = None,
    scratch: Array | None = None,
) -> tuple[Array, Array]:
    """Codes uint8 [rows, bytes] and scales, in new arrays or in those that are given.

    `tensor_scale`: of NVFP4, 448 * 6 / the largest magnitude of the tensor. Raises NonFiniteError
    with the first NaN or Inf.
    """
    shape = matrix.rows, matrix.cols
    dtype = encoding.scale_array(*shape)
    codes = np.empty(encoding.code_shape(*shape), np.uint8) if codes is None else codes
    scales = np.empty(encoding.scale_shape(*shape), dtype) if scales is None else scales
    _expect_arrays(encoding, matrix, codes, scales)
    scratch = new_scratch(matrix.cols) if scratch is None else scratch
    bad = ffi.new("kt_position *")
    status = lib.kt_encode(
        _struct(encoding),
        matrix.c,
        tensor_scale,
        byte_pointer(codes, writable=True),
        byte_pointer(scales, writable=True),
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
        bad,
    )
    check(status, bad)
    return codes, scales


def encode_audit(
    encoding: Encoding,
    matrix: Matrix,
    tensor_scale: float,
    codes: Array,
    scales: Array,
    scratch: Array,
) -> tuple[EncodedAudit, ByteSums]:
    """`encode` into given arrays and `audit_encoded` of the result, in one pass; with the sums of
    the bytes as they were when they had been compared. Raises NonFiniteError with the first NaN or
    Inf, ValueError for shapes that `audit_encoded` does not take."""
    _expect_arrays(encoding, matrix, codes, scales)
    found, sums = ffi.new("kt_encoded_audit *"), ffi.new("uint64_t[2]")
    bad = ffi.new("kt_position *")
    status = lib.kt_encode_audit(
        _struct(encoding),
        matrix.c,
        tensor_scale,
        byte_pointer(codes, writable=True),
        byte_pointer(scales, writable=True),
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
        found,
        sums,
        bad,
    )
    check(status, bad)
    return _audit_of(found), ByteSums(*sums)


def largest(matrix: Matrix, scratch: Array | None = None) -> float:
    """The largest magnitude. Raises NonFiniteError with the first NaN or Inf."""
    scratch = new_scratch(matrix.cols) if scratch is None else scratch
    bad, found = ffi.new("kt_position *"), ffi.new("float *")
    memory = ffi.from_buffer(scratch, require_writable=True)
    check(lib.kt_largest(matrix.c, found, memory, scratch.nbytes, bad), bad)
    return float(found[0])


class EncodedAudit(NamedTuple):
    """struct kt_encoded_audit; ktconv.h explains the fields."""

    squared_source: float
    squared_error: float
    squared_value: float
    max_steps: float
    zeros: int
    other_codes: int
    other_scales: int


def audit_encoded(
    encoding: Encoding, source: Matrix, codes: Array, scales: Array, tensor_scale: float = 0.0
) -> EncodedAudit:
    """Compares codes and scales with their source; shares no code with `encode`.

    ValueError for shapes that it does not take, see kt_audit_encoded.
    """
    _expect_arrays(encoding, source, codes, scales)
    found = ffi.new("kt_encoded_audit *")
    status = lib.kt_audit_encoded(
        _struct(encoding), source.c, tensor_scale, byte_pointer(codes), byte_pointer(scales), found
    )
    check(status)
    return _audit_of(found)


def _expect_arrays(encoding: Encoding, matrix: Matrix, codes: Array, scales: Array) -> None:
    """ValueError for arrays of another size than the codes and scales of a matrix have."""
    shape = matrix.rows, matrix.cols
    scale_bytes = encoding.scale_array(*shape)().itemsize
    expect_bytes("codes", codes, math.prod(encoding.code_shape(*shape)))
    expect_bytes("scales", scales, math.prod(encoding.scale_shape(*shape)) * scale_bytes)


def _audit_of(found: Any) -> EncodedAudit:
    return EncodedAudit(*(getattr(found, name) for name in EncodedAudit._fields))
