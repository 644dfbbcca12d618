"""Sums of squares of a matrix's rows, the same bits on every machine."""

from __future__ import annotations

import numpy as np

from ktconv import native
from ktconv.source import ExpertMatrix
from ktconv.source.reading.matrices import ROWS_STEP, MatrixReader, Scales, buffer_bytes, chunk_rows
from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader
from ktconv.system.arrays import F32, F64, U8, Array

_LANES = 512  # columns that are added up apart; whole units of every encoding
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # of sums in binary32; others are added up in binary64


def row_squares(reader: SourceReader, matrix: ExpertMatrix, factors: F32) -> F64:
    """Sums over c of (w[i, c] factors[c])^2, [rows]; `factors`: [cols]. CheckpointError for a NaN
    or an infinity.

    A sum is that of every 512th column from the first on, and then of the two halves of these 512
    sums, of their halves, and so on. Each of those additions is of whole arrays: NumPy has no order
    of its own to choose.
    """
    source = MatrixReader(reader, matrix)
    data = np.empty(buffer_bytes(matrix, _rows(matrix)), np.uint8)
    bounce = np.empty(BOUNCE_BYTES, np.uint8)
    sums = np.empty(matrix.rows, np.float64)
    with source.open() as fd:
        scales = source.load_scales()
        for start in range(0, matrix.rows, _rows(matrix)):
            chunk = range(start, min(start + _rows(matrix), matrix.rows))
            source.read(fd, chunk, data, bounce)
            sums[chunk.start : chunk.stop] = _of_chunk(source, scales, chunk, data, factors)
    return sums


def squares_memory(matrix: ExpertMatrix) -> int:
    """Bytes that `row_squares` needs."""
    rows = _rows(matrix)
    return buffer_bytes(matrix, rows) + BOUNCE_BYTES + 8 * 4 * rows * _LANES + 16 * matrix.rows


def _rows(matrix: ExpertMatrix) -> int:
    """Rows of a chunk: few, so that lanes stay in the cache, but for a matrix that is gathered from
    many short runs."""
    return min(ROWS_STEP if matrix.col_stride == 1 else chunk_rows(matrix), matrix.rows)


def _of_chunk(
    source: MatrixReader, scales: Scales | None, chunk: range, data: U8, factors: F32
) -> F64:
    """[rows of the chunk]"""
    with np.errstate(over="ignore", under="ignore"):
        sums = _added(source, scales, chunk, data, factors)
        if ((sums >= _SMALLEST) & (sums <= _LARGEST)).all():
            return sums.astype(np.float64)
    sums = _added(source, scales, chunk, data, factors.astype(np.float64))
    if not np.isfinite(sums).all():
        _refuse(source, scales, chunk, data)
    return sums.astype(np.float64)


def _added(
    source: MatrixReader, scales: Scales | None, chunk: range, data: U8, factors: Array
) -> Array:
    """Sums in the precision of `factors`."""
    lanes = np.zeros((len(chunk), _LANES), factors.dtype)
    for first in range(0, len(factors), _LANES):
        cols = min(_LANES, len(factors) - first)
        view = source.view(chunk, scales, data, first, cols)
        terms: Array = native.decode(view).astype(factors.dtype, copy=False)
        terms *= factors[first : first + cols]
        terms *= terms
        lanes[:, :cols] += terms
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _refuse(source: MatrixReader, scales: Scales | None, chunk: range, data: U8) -> None:
    """CheckpointError for the first value that is not finite."""
    values = native.decode(source.view(chunk, scales, data, 0, source.matrix.cols))
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        raise source.not_finite(chunk.start + int(bad[0, 0]), int(bad[0, 1]))
