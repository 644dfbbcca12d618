"""Comparing packed matrices with their source, by code of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from ktconv._native import ffi, lib
from ktconv.native.arrays import (
    Array,
    aligned_to,
    byte_pointer,
    check,
    expect_bytes,
)
from ktconv.native.layouts import Layout, layout_of, packed_size
from ktconv.native.packing import new_scratch
from ktconv.native.rules import Choice, choice_of
from ktconv.native.source import Matrix


class Audit(Struct):
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
    """`byte_sum` of codes and of scales."""

    packed: int
    scale: int


class Unpacked(NamedTuple):
    """A matrix for `quantize_audit`, and where its packed codes and scales will be."""

    source: Matrix
    packed: Array
    scale: Array  # aligned to its elements
    choice: Choice


def byte_sum(data: Array) -> int:
    """Sum, modulo 2^64, of bytes taken as words of 64 bits. Contents of which a bit or a word has
    changed have another sum; words in another order have the same."""
    return int(lib.kt_byte_sum(byte_pointer(data), data.nbytes))


def same_bytes(data: Array, others: Array) -> int | None:
    """`byte_sum` of `data`, if `others` has the same bytes; else None."""
    expect_bytes("others", others, data.nbytes)
    total = ffi.new("uint64_t *")
    same = lib.kt_same_bytes(byte_pointer(data), byte_pointer(others), data.nbytes, total)
    return int(total[0]) if same else None


_kept = threading.local()


def _scratch(cols: int) -> Array:
    """Scratch of this thread, kept for the columns of its last call."""
    if getattr(_kept, "cols", -1) != cols:
        _kept.cols, _kept.scratch = cols, new_scratch(cols)
    found: Array = _kept.scratch
    return found


class _Results:
    """Memory for what is found in the rows of matrices."""

    def __init__(self, layout: Layout, sources: Sequence[Matrix]) -> None:
        self._sources = sources
        self._shapes = [layout.scale_shape(one.rows, one.cols) for one in sources]
        self._maxima = np.empty(3 * sum(map(math.prod, self._shapes)), np.float32)
        self._squared = np.empty(2 * sum(one.rows for one in sources))
        self._places = list(self._placed())

    def _placed(self) -> Iterator[tuple[int, int]]:
        """The index of each matrix's first maximum, and that of its first square."""
        maxima = squared = 0
        for source, shape in zip(self._sources, self._shapes, strict=True):
            yield maxima, squared
            maxima, squared = maxima + 3 * math.prod(shape), squared + 2 * source.rows

    def pointers(self) -> Iterator[tuple[Any, ...]]:
        """The arguments `error` to `squared` of kt_quantize_audit, matrix by matrix."""
        maxima = ffi.from_buffer("float[]", self._maxima)
        squared = ffi.from_buffer("double[]", self._squared)
        for (start, rows), shape in zip(self._places, self._shapes, strict=True):
            first, size = maxima + start, math.prod(shape)
            yield first, first + size, first + 2 * size, squared + rows

    def audit(self, index: int, sums: Any) -> Audit:
        """The audit of one matrix; `sums` is its kt_audit."""
        source, shape = self._sources[index], self._shapes[index]
        start, first = self._places[index]
        maxima = self._maxima[start : start + 3 * math.prod(shape)].reshape(3, *shape)
        squared = self._squared[first : first + 2 * source.rows].reshape(2, -1)
        return Audit(
            sums.squared_source,
            sums.squared_error,
            sums.squared_value,
            sums.max_steps,
            sums.zeros,
            sums.invalid,
            source.rows * source.cols,
            *maxima,
            *squared,
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
    found, sums = _Results(layout, [source]), ffi.new("kt_audit *")
    (pointers,) = found.pointers()
    status = lib.kt_audit_run(
        layout.c(),
        source.c,
        choice_of(choice, source.cols),
        rows,
        first,
        byte_pointer(packed),
        ffi.from_buffer(aligned_to(scale, layout.scale_array.itemsize)),
        *pointers,
        sums,
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
    )
    check(status)
    return found.audit(0, sums)


def quantize_audit(
    layout: Layout, matrices: Sequence[Unpacked], scratch: Array
) -> list[tuple[Audit, ByteSums]]:
    """`quantize_pack` and `audit` of the result, in one pass and one call for all matrices; with
    the sums of the bytes as they were when they had been compared. Raises NonFiniteError with the
    first NaN or Inf, and the index of its matrix."""
    proven = ffi.new("kt_proven[]", len(matrices))
    found, kept = _Results(layout, [source for source, *_ in matrices]), []
    for one, (source, packed, scale, choice), pointers in zip(
        proven, matrices, found.pointers(), strict=True
    ):
        expect_bytes("packed", packed, packed_size(layout, source.rows, source.cols))
        expect_bytes("scale", scale, layout.scale_size(source.rows, source.cols))
        memory = byte_pointer(packed, True), byte_pointer(scale, True)
        if int(ffi.cast("uintptr_t", memory[1])) % layout.scale_array.itemsize:
            raise ValueError("scale must be aligned to its elements")
        one.matrix, one.choice = source.c, choice_of(choice, source.cols)
        one.packed, one.packed_scale = memory
        one.error, one.amax, one.rule, one.squared = pointers
        kept.append(memory)
    bad, failed = ffi.new("kt_position *"), ffi.new("int64_t *")
    room = ffi.from_buffer(scratch, require_writable=True)
    status = lib.kt_quantize_audit(
        layout.c(), proven, len(matrices), room, scratch.nbytes, failed, bad
    )
    check(status, bad, int(failed[0]))
    return [(found.audit(i, one.audit), ByteSums(*one.sums)) for i, one in enumerate(proven)]


def audit_codes(layout: Layout | str, packed: Array, rows: int, cols: int) -> Array:
    """Codes int8 [rows, cols] of packed bytes, by the audit's own path."""
    layout = layout_of(layout)
    expect_bytes("packed", packed, packed_size(layout, rows, cols))
    codes = np.empty((rows, cols), np.int8)
    target = ffi.cast("int8_t *", ffi.from_buffer(codes))
    check(lib.kt_audit_codes(layout.c(), byte_pointer(packed), rows, cols, target))
    return codes
