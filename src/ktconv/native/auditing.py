"""Comparing packed matrices with their source, by code of its own."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import (
    Array,
    address_of,
    aligned_to,
    byte_pointer,
    check,
    expect_bytes,
)
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


class ByteSums(NamedTuple):
    """`byte_sum` of packed codes and of packed scales."""

    packed: int
    scale: int


def byte_sum(data: Array) -> int:
    """Sum, modulo 2^64, of bytes taken as words of 64 bits. Contents of which a bit or a word has
    changed have another sum; words in another order have the same."""
    return int(lib.kt_byte_sum(byte_pointer(data), data.nbytes))


_kept = threading.local()


def _scratch(cols: int) -> Array:
    """Scratch of this thread, kept for the columns of its last call."""
    if getattr(_kept, "cols", -1) != cols:
        _kept.cols, _kept.scratch = cols, new_scratch(cols)
    found: Array = _kept.scratch
    return found


class _Results:
    """Memory for what is found in the rows of `source`."""

    def __init__(self, layout: Layout, source: Matrix) -> None:
        found = layout.scale_shape(source.rows, source.cols)
        self._source, self._maxima = source, np.empty((3, *found), np.float32)
        self._squared = np.empty((2, source.rows))
        self._sums = ffi.new("kt_audit *")

    def c(self) -> tuple[Any, ...]:
        """The arguments error to audit."""
        first, size = ffi.from_buffer("float[]", self._maxima), self._maxima[0].size
        squared = ffi.from_buffer("double[]", self._squared)
        return first, first + size, first + 2 * size, squared, self._sums

    def audit(self) -> Audit:
        sums = self._sums
        return Audit(
            sums.squared_source,
            sums.squared_error,
            sums.squared_value,
            sums.max_steps,
            sums.zeros,
            sums.invalid,
            self._source.rows * self._source.cols,
            *self._maxima,
            *self._squared,
        )


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
    scratch = _scratch(source.cols) if scratch is None else scratch
    found = _Results(layout, source)
    status = lib.kt_audit_run(
        layout.c(),
        source.c,
        choice_of(choice, source.cols),
        rows,
        first,
        byte_pointer(packed),
        ffi.from_buffer(aligned_to(scale, layout.scale_array.itemsize)),
        *found.c(),
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
    )
    check(status)
    return found.audit()


def quantize_audit(
    layout: Layout, source: Matrix, packed: Array, scale: Array, scratch: Array, choice: Choice
) -> tuple[Audit, ByteSums]:
    """`quantize_pack` into `packed` and `scale` (aligned to its elements), and `audit` of the
    result, in one pass; with the sums of the bytes as they were when they had been compared.
    Raises NonFiniteError with the first NaN or Inf."""
    expect_bytes("packed", packed, packed_size(layout, source.rows, source.cols))
    expect_bytes("scale", scale, layout.scale_size(source.rows, source.cols))
    if address_of(scale) % layout.scale_array.itemsize:
        raise ValueError("scale must be aligned to its elements")
    found, bad = _Results(layout, source), ffi.new("kt_position *")
    sums = ffi.new("uint64_t[2]")
    status = lib.kt_quantize_audit(
        layout.c(),
        source.c,
        choice_of(choice, source.cols),
        byte_pointer(packed, writable=True),
        ffi.from_buffer(scale, require_writable=True),
        *found.c(),
        sums,
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
        bad,
    )
    check(status, bad)
    return found.audit(), ByteSums(*sums)


def audit_codes(layout: Layout | str, packed: Array, rows: int, cols: int) -> Array:
    """Codes int8 [rows, cols] of packed bytes, by the audit's own path."""
    layout = layout_of(layout)
    expect_bytes("packed", packed, packed_size(layout, rows, cols))
    codes = np.empty((rows, cols), np.int8)
    target = ffi.cast("int8_t *", ffi.from_buffer(codes))
    check(lib.kt_audit_codes(layout.c(), byte_pointer(packed), rows, cols, target))
    return codes
