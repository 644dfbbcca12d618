"""Expert matrices read chunk by chunk: bytes of a checkpoint as views for the C library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktconv import native
from ktconv.checkpoint import BlockScale, ExpertMatrix, load_block_scale, scale_span
from ktconv.errors import CheckpointError
from ktconv.reading.reader import Runs, SourceReader, Span

CHUNK_BYTES = 4 << 20  # of source: small enough for the cache, large enough for the disk
STRIDED_CHUNK_BYTES = 16 << 20  # where a chunk is gathered from many short runs
ROWS_STEP = 128  # chunks are whole row blocks of every format
ITEM_SIZE = {dtype: native.stored_unit(dtype)[0] for dtype in ("BF16", "F16", "F32", "F8_E4M3")}

Grid = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start`..`stop` of a matrix, all of one part for gate and up."""

    start: int
    stop: int


def chunks(matrix: ExpertMatrix, part_rows: int) -> Iterator[Chunk]:
    """Cuts a matrix into chunks that fit the buffers; parts of `part_rows` rows stay apart."""
    rows = chunk_rows(matrix)
    for part in range(0, matrix.rows, part_rows):
        for start in range(part, part + part_rows, rows):
            yield Chunk(start, min(start + rows, part + part_rows))


def chunk_rows(matrix: ExpertMatrix) -> int:
    """Rows per chunk: as many whole row blocks as the target holds, at least one."""
    target = CHUNK_BYTES if matrix.col_stride == 1 else STRIDED_CHUNK_BYTES
    row_bytes = matrix.cols * ITEM_SIZE[matrix.tensor.dtype]
    return max(1, target // (row_bytes * ROWS_STEP)) * ROWS_STEP


def span_of(matrix: ExpertMatrix) -> Span:
    """The bytes of a file that a matrix lies in."""
    size = ITEM_SIZE[matrix.tensor.dtype]
    last = (matrix.rows - 1) * matrix.row_stride + (matrix.cols - 1) * matrix.col_stride
    start = matrix.tensor.offset + matrix.start * size
    return Span(matrix.tensor.file, start, (last + 1) * size)


@dataclass(frozen=True, slots=True)
class MatrixReader:
    """Reads one matrix; `round_to_bf16` is for what the reference converter makes of it."""

    reader: SourceReader
    matrix: ExpertMatrix
    round_to_bf16: bool = False

    def open(self) -> AbstractContextManager[int]:
        """A descriptor of the file that the matrix lies in."""
        return self.reader.open(self.matrix.tensor.file)

    def load_scales(self) -> Grid | None:
        """Its block scales, if it has some."""
        scale = self.matrix.scale
        if scale is None:
            return None
        rows, cols = self.matrix.rows, self.matrix.cols
        offset, nbytes = scale_span(scale, rows, cols)
        data = bytearray(nbytes)
        with self.reader.open(scale.tensor.file) as fd:
            self.reader.read(fd, scale.tensor, memoryview(data), offset)
        return load_block_scale(scale, rows, cols, data)

    def not_finite(self, row: int, col: int) -> CheckpointError:
        """Why the value at (row, col) is a NaN or an infinity."""
        tensor, matrix = self.matrix.tensor, self.matrix
        flat = matrix.start + row * matrix.row_stride + col * matrix.col_stride
        position = ", ".join(str(int(i)) for i in np.unravel_index(flat, tensor.shape))
        grid, scale = self.load_scales(), matrix.scale
        if grid is not None and scale is not None and not self._is_nan(flat):
            factor = grid[
                (scale.row_origin % scale.block_rows + row) // scale.block_rows,
                (scale.col_origin % scale.block_cols + col) // scale.block_cols,
            ]
            return CheckpointError(
                f"tensor {tensor.name} in {tensor.file}: the value at [{position}] times its "
                f"scale {factor:.4g} in {scale.tensor.name} is beyond float32",
                "download the files again; if the original has this, it cannot be quantized",
            )
        return CheckpointError(
            f"tensor {tensor.name} in {tensor.file} holds a NaN or an infinity at [{position}]",
            "download the file again; if the original has it, the model cannot be quantized",
        )

    def _is_nan(self, flat: int) -> bool:
        """Whether FP8 element `flat` of the tensor is one; E4M3 has no infinities."""
        code = bytearray(1)
        with self.open() as fd:
            self.reader.read(fd, self.matrix.tensor, memoryview(code), flat)
        return code[0] & 0x7F == 0x7F

    def read(self, fd: int, chunk: Chunk, target: U8, bounce: U8) -> int:
        """The chunk's elements, densely packed in their own orientation; bytes read."""
        matrix, size = self.matrix, ITEM_SIZE[self.matrix.tensor.dtype]
        rows = chunk.stop - chunk.start
        data = target.data[: rows * matrix.cols * size]
        if matrix.col_stride == 1:
            runs, run_length, stride = rows, matrix.cols, matrix.row_stride
        else:
            runs, run_length, stride = matrix.cols, rows, matrix.col_stride
        start = (matrix.start + chunk.start * matrix.row_stride) * size
        where = Runs(start, run_length * size, stride * size, runs)
        self.reader.read_runs(fd, matrix.tensor, data, where, bounce.data)
        return len(data)

    def view(
        self, chunk: Chunk, grid: Grid | None, data: U8, first_col: int, cols: int
    ) -> native.Matrix:
        """Columns from `first_col` on of the chunk that `read` left in `data`."""
        matrix, rows = self.matrix, chunk.stop - chunk.start
        dense = matrix.col_stride == 1
        row_stride, col_stride = (matrix.cols, 1) if dense else (1, rows)
        scale = matrix.scale
        return native.Matrix(
            data,
            matrix.tensor.dtype,
            rows,
            cols,
            start=first_col * col_stride,
            row_stride=row_stride,
            col_stride=col_stride,
            block_scale=grid,
            block=(scale.block_rows, scale.block_cols) if scale else (1, 1),
            origin=_origin(scale, chunk.start, first_col),
            round_to_bf16=self.round_to_bf16,
        )


def _origin(scale: BlockScale | None, row: int, col: int) -> tuple[int, int]:
    """Where element (row, col) of a matrix lies in its grid of block scales, in elements.

    `load_block_scale` starts the grid at the block of element (0, 0).
    """
    if scale is None:
        return 0, 0
    return scale.row_origin % scale.block_rows + row, scale.col_origin % scale.block_cols + col
