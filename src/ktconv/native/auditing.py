"""Comparing packed matrices with their source, by code of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, aligned_to, byte_pointer, check, expect_bytes
from ktconv.native.layouts import Layout, layout_of, packed_size
from ktconv.native.packing import new_scratch
from ktconv.native.rules import Choice, choice_of
from ktconv.native.source import Matrix


@dataclass(slots=True)
class Audit:
    """Findings of `audit` in some rows: sums over all elements, and maxima of what each scale is
    for: a row, or a group of its columns."""

    squared_source: float
    squared_error: float
    squared_value: float
    max_steps: float
    zeros: int
    invalid: int  # codes outside the format's range, or not 0 under scale 0
    elements: int
    row_error: Array  # float32, shaped as plain scales: largest |source - dequantized|; under
    # "search" of the source cut to the levels
    row_amax: Array  # the same: largest |source|
    row_scale: Array  # the same: what the rule makes of these weights
    row_squared_error: Array  # float64 [rows]: each row's part of squared_error
    row_squared_source: Array  # likewise


def audit(
    layout: Layout | str,
    source: Matrix,
    rows: int,
    first: int,
    packed: Array,
    scale: Array,
    choice: Choice | None = None,
    scratch: Array | None = None,
) -> Audit:
    """Compares rows from `first` on of a packed matrix [rows, cols] with their source.

    `packed` (uint8) and `scale` (packed scales) are those of the whole matrix. Shares no code
    with quantize and pack.
    """
    layout = layout_of(layout)
    expect_bytes("packed", packed, packed_size(layout, rows, source.cols))
    expect_bytes("scale", scale, layout.scale_size(rows, source.cols))
    found = layout.scale_shape(source.rows, source.cols)
    error, amax, rule = maxima = np.empty((3, *found), np.float32)
    squared = np.empty((2, source.rows))
    scratch = new_scratch(source.cols) if scratch is None else scratch
    sums, first_maximum = ffi.new("kt_audit *"), ffi.from_buffer("float[]", maxima)
    status = lib.kt_audit_run(
        layout.c(),
        source.c,
        choice_of(choice, source.cols),
        rows,
        first,
        byte_pointer(packed),
        ffi.from_buffer(aligned_to(scale, layout.scale_array.itemsize)),
        first_maximum,
        first_maximum + error.size,
        first_maximum + 2 * error.size,
        ffi.from_buffer("double[]", squared),
        sums,
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
    )
    check(status)
    return Audit(
        sums.squared_source,
        sums.squared_error,
        sums.squared_value,
        sums.max_steps,
        sums.zeros,
        sums.invalid,
        source.rows * source.cols,
        error,
        amax,
        rule,
        squared[0],
        squared[1],
    )


def audit_codes(layout: Layout | str, packed: Array, rows: int, cols: int) -> Array:
    """Codes int8 [rows, cols] of packed bytes, by the audit's own path."""
    layout = layout_of(layout)
    expect_bytes("packed", packed, packed_size(layout, rows, cols))
    codes = np.empty((rows, cols), np.int8)
    target = ffi.cast("int8_t *", ffi.from_buffer(codes))
    check(lib.kt_audit_codes(layout.c(), byte_pointer(packed), rows, cols, target))
    return codes
