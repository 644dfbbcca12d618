"""Comparing packed matrices with their source, by code of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, aligned_floats, byte_pointer, check, expect_bytes
from ktconv.native.packing import FORMATS, packed_size
from ktconv.native.source import Matrix


@dataclass(slots=True)
class Audit:
    """What `audit` found in some rows: sums over all elements, and maxima of each row."""

    squared_source: float
    squared_error: float
    squared_value: float
    max_steps: float
    zeros: int
    invalid: int  # codes outside the format's range, or not 0 under scale 0
    row_error: Array  # float32 [rows]: largest |source - dequantized|
    row_amax: Array  # float32 [rows]: largest |source|
    row_scale: Array  # float32 [rows]: what the rule makes of that


def audit(format: str, source: Matrix, rows: int, first: int, packed: Array, scale: Array) -> Audit:
    """Compares rows from `first` on of a packed matrix [rows, cols] with their source.

    `packed` (uint8) and `scale` (float32 [rows]) are those of the whole matrix. Shares no code
    with quantize and pack.
    """
    expect_bytes("packed", packed, packed_size(format, rows, source.cols))
    expect_bytes("scale", scale, 4 * rows)
    error, amax, rule = (np.empty(source.rows, np.float32) for _ in range(3))
    sums = ffi.new("kt_audit *")
    status = lib.kt_audit_run(
        FORMATS[format],
        source.c,
        rows,
        first,
        byte_pointer(packed),
        ffi.cast("float *", ffi.from_buffer(aligned_floats(scale))),
        ffi.cast("float *", ffi.from_buffer(error)),
        ffi.cast("float *", ffi.from_buffer(amax)),
        ffi.cast("float *", ffi.from_buffer(rule)),
        sums,
    )
    check(status)
    return Audit(
        sums.squared_source,
        sums.squared_error,
        sums.squared_value,
        sums.max_steps,
        sums.zeros,
        sums.invalid,
        error,
        amax,
        rule,
    )


def audit_codes(format: str, packed: Array, rows: int, cols: int) -> Array:
    """`unpack` by the audit's own path."""
    expect_bytes("packed", packed, packed_size(format, rows, cols))
    codes = np.empty((rows, cols), np.int8)
    target = ffi.cast("int8_t *", ffi.from_buffer(codes))
    check(lib.kt_audit_codes(FORMATS[format], byte_pointer(packed), rows, cols, target))
    return codes
