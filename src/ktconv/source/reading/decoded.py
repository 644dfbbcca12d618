"""Matrices of a checkpoint in the precision of the model, bf16 or half, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ktconv.source import ExpertMatrix
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.system.arrays import F32, U16


def decoded_rows(
    reader: SourceReader,
    matrix: ExpertMatrix,
    buffers: Buffers,
    advance: Callable[[int], None],
    half: bool = False,
) -> Iterator[tuple[int, U16]]:
    """(first row, rows as bits of bf16, or of half precision).

    Calls `advance` with the bytes read. Raises CheckpointError for a NaN or an infinity.
    """
    source = MatrixReader(reader, matrix, round_to_bf16=not half)
    for chunk, values in source.decoded(buffers.source, buffers.bounce):
        source.finite(values, chunk.start)
        yield chunk.start, _half(values) if half else _bf16(values)
        advance(matrix.nbytes(chunk.stop - chunk.start))


def _half(values: F32) -> U16:
    return values.astype(np.float16).view(np.uint16)


def _bf16(values: F32) -> U16:
    """Exact: the values are bf16 already."""
    return np.ascontiguousarray(values.view(np.uint16)[:, 1::2])
