"""Parts of expert matrices, transposed: the matrices of backward passes, a few rows at a time.

A row of the transpose has an element of every row of the source, so the source is decoded into a
*panel*: as many of its columns as fit a fixed size. A matrix that needs several panels is read once
for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from msgspec.structs import replace

from ktconv import native
from ktconv.formats import Slice
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import ROWS_STEP, MatrixReader, Scales, chunk_rows
from ktconv.system.arrays import F32
from ktconv.system.opened import Opened

PANEL_BYTES = 32 << 20  # of float32
STEP_BYTES = 4 << 20  # of float32: rows that are quantized or compared together

Seen = Callable[[range, range, F32], None]  # rows, columns and values of the source


def panel_columns(rows: int, cols: int) -> int:
    """Columns of a [rows, cols] piece of a source that are in memory together."""
    return min(cols, max(1, PANEL_BYTES // (4 * rows) // ROWS_STEP) * ROWS_STEP)


def step_rows(rows: int, cols: int) -> int:
    """Rows of the transpose of a [rows, cols] piece that `transposed` yields together."""
    return min(cols, max(1, STEP_BYTES // (4 * rows) // ROWS_STEP) * ROWS_STEP)


def transposed_bytes(rows: int, cols: int) -> int:
    """Memory for a panel of a [rows, cols] piece of a source and a step of its transpose."""
    return 4 * rows * (panel_columns(rows, cols) + step_rows(rows, cols))


def transposed(
    source: MatrixReader,
    fd: Opened,
    scales: Scales | None,
    owned: Slice,
    buffers: Buffers,
    seen: Seen | None = None,
) -> Iterator[tuple[int, native.Matrix]]:
    """The transpose [columns, rows] of the elements `owned`, in float32: the number of the first of
    its rows, and the next rows. They are valid until the next ones are asked for.

    `fd` and `scales` are those of `source`; `seen` gets all that was decoded.
    """
    height, width = owned.shape
    columns = panel_columns(height, width)
    panel = np.empty(height * columns, np.float32)
    for first in range(0, width, columns):
        count = min(columns, width - first)
        start = owned.col_start + first
        piece = replace(owned, col_start=start, col_stop=start + count)
        values = panel[: height * count].reshape(height, count)
        _fill(values, piece, source, fd, scales, buffers, seen)
        data, step = values.reshape(-1).view(np.uint8), step_rows(height, count)
        for row in range(0, count, step):
            rows = min(step, count - row)
            view = native.Matrix(
                data, "F32", rows, height, start=row, row_stride=1, col_stride=count
            )
            yield first + row, view


def _fill(
    values: F32,
    piece: Slice,
    source: MatrixReader,
    fd: Opened,
    scales: Scales | None,
    buffers: Buffers,
    seen: Seen | None,
) -> None:
    """The elements `piece`, decoded into `values`."""
    rows, columns = chunk_rows(source.matrix), range(piece.col_start, piece.col_stop)
    for start in range(piece.row_start, piece.row_stop, rows):
        chunk = range(start, min(start + rows, piece.row_stop))
        source.read(fd, chunk, buffers.source, buffers.bounce)
        view = source.view(chunk, scales, buffers.source, columns.start, len(columns))
        first = chunk.start - piece.row_start
        target = values[first : first + len(chunk)]
        native.decode(view, target)
        if seen is not None:
            seen(chunk, columns, target)
