"""Matrices of experts read from a checkpoint into tensors, each byte once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct

from ktconv.families.family import Projection
from ktconv.model.streamed.one_expert import OneExpert
from ktconv.source import ExpertMatrix, TensorRef
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.decoded import decoded_rows
from ktconv.source.reading.matrices import MatrixReader, buffers_of, chunks
from ktconv.source.reading.reader import Runs, SourceReader
from ktconv.system.arrays import F32, U8, Array
from ktconv.system.opened import Opened

_STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_NUMBERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.float32}
# The bits of a number as integers, and the least of those of a positive one that is not finite.
_NOT_FINITE = {
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}
Matrices = Mapping[Projection, ExpertMatrix]


def filling_memory(matrices: Iterable[ExpertMatrix], dtype: torch.dtype) -> int:
    """Bytes of an expert as `dtype`, of its encoded form where that is read whole, and of the
    buffers."""
    total, largest = 0, 0
    for matrix in matrices:
        total += matrix.rows * matrix.cols * dtype.itemsize
        total += 0 if _is_dense(matrix) else matrix.nbytes(matrix.rows)
        largest = max(largest, buffers_of([matrix]).nbytes)
    return total + largest


class ExpertFiller:
    """Fills tensors of one expert in turn; of one thread. `dtype` is theirs: bfloat16, float16 or
    float32."""

    def __init__(self, reader: SourceReader, dtype: torch.dtype) -> None:
        self._reader, self._dtype = reader, dtype
        self._sizes = BufferSizes()
        self._buffers: Buffers | None = None

    def fill(self, matrices: Matrices, one: OneExpert) -> None:
        """Decode an expert. CheckpointError for a NaN or an infinity; other errors are those of
        SourceReader."""
        reader = self._loaded(matrices.values())
        for projection, matrix in matrices.items():
            view = one.matrices[projection]
            target = view if view.device.type == "cpu" else torch.empty_like(view, device="cpu")
            values = target.view(_NUMBERS[self._dtype]).numpy()
            if reader is self._reader and self._is_same(matrix) and values.flags.c_contiguous:
                self._read(MatrixReader(reader, matrix), values)
            else:
                self._decode(reader, matrix, values)
            if target is not view:
                view.copy_(target)
        self._fill_biases(matrices, one)

    def put(self, matrices: Matrices, values: Mapping[Projection, F32], one: OneExpert) -> None:
        """Take other values of an expert's matrices; biases are those of the checkpoint."""
        for projection, matrix in values.items():
            one.matrices[projection].copy_(torch.from_numpy(matrix))
        self._fill_biases(matrices, one)

    def _fill_biases(self, matrices: Matrices, one: OneExpert) -> None:
        for projection, target in one.biases.items():
            bias = MatrixReader(self._reader, matrices[projection]).load_bias()
            target.copy_(torch.zeros(()) if bias is None else torch.from_numpy(bias))

    def _is_same(self, matrix: ExpertMatrix) -> bool:
        """Whether its bytes are what a contiguous tensor has."""
        plain = matrix.quantization is None and matrix.tensor.dtype == _STORED[self._dtype]
        return plain and _is_dense(matrix)

    def _read(self, source: MatrixReader, values: Array) -> None:
        """Straight into memory."""
        size = source.matrix.nbytes(1)
        with source.open() as fd:
            for chunk in chunks(source.matrix, source.matrix.rows):
                rows = values[chunk.start : chunk.stop]
                start = source.matrix.start * values.itemsize + chunk.start * size
                data = rows.reshape(-1).view(np.uint8).data
                source.reader.read(fd, source.matrix.tensor, data, start)
                self._check(source, rows, chunk.start)

    def _check(self, source: MatrixReader, rows: Array, first: int) -> None:
        """CheckpointError for a NaN or an infinity in float32, or in bits of a 16-bit dtype."""
        signed, unsigned, least = _NOT_FINITE[self._dtype]
        bits, sign = rows.view(signed), 1 << 8 * rows.itemsize - 1
        # Two maxima take a third of the time of looking at each exponent.
        if bits.max() >= least or bits.view(unsigned).max() >= sign + least:
            bad = (bits & signed(sign - 1)) >= least
            row, col = (int(i) for i in np.argwhere(bad)[0])
            raise source.not_finite(first + row, col)

    def _decode(self, reader: SourceReader, matrix: ExpertMatrix, values: Array) -> None:
        buffers = self._enough(matrix)
        if self._dtype == torch.float32:
            source = MatrixReader(reader, matrix)
            for chunk, decoded in source.decoded(buffers.source, buffers.bounce):
                self._check(source, decoded, chunk.start)
                values[chunk.start : chunk.stop] = decoded
            return
        half = self._dtype == torch.float16
        for first, bits in decoded_rows(reader, matrix, buffers, lambda _: None, half):
            values[first : first + len(bits)] = bits.view(np.int16)

    def _enough(self, matrix: ExpertMatrix) -> Buffers:
        needed = buffers_of([matrix])
        if self._buffers is None or needed.source > self._sizes.source:
            self._sizes, self._buffers = needed, Buffers(needed)
        return self._buffers

    def _loaded(self, matrices: Iterable[ExpertMatrix]) -> SourceReader:
        """A reader with the bytes of these matrices. Those whose bytes lie between those of others
        are read together, since their runs would otherwise be read with all that is between
        them."""
        extents: dict[Path, list[tuple[int, int]]] = {}
        tensors: dict[Path, TensorRef] = {}
        for matrix in matrices:
            if not _is_dense(matrix):
                start, nbytes = matrix.extent
                extents.setdefault(matrix.tensor.file, []).append((start, start + nbytes))
                tensors[matrix.tensor.file] = matrix.tensor
        if not extents:
            return self._reader
        spans = []
        for path, found in extents.items():
            with self._reader.open(path) as fd:
                for start, stop in _merged(found):
                    data = np.empty(stop - start, np.uint8)
                    tensor = tensors[path]
                    self._reader.read(fd, tensor, data.data, start - tensor.offset)
                    spans.append(_Span(path, start, data))
        return _LoadedReader(self._reader, spans)


class _Span(Struct, frozen=True):
    """Bytes of a file from `start` on."""

    file: Path
    start: int
    data: U8


class _LoadedReader(SourceReader):
    """Reads from memory what is there."""

    maps = False

    def __init__(self, source: SourceReader, spans: list[_Span]) -> None:
        super().__init__((), ())
        self._source, self._spans = source, spans

    @contextmanager
    def open(self, path: Path) -> Iterator[Opened]:
        with self._source.open(path) as fd:
            yield fd

    def read(self, fd: Opened, tensor: TensorRef, target: memoryview, offset: int) -> None:
        found = self._part(tensor, offset, len(target))
        if found is None:
            super().read(fd, tensor, target, offset)
        else:
            target[:] = found.data

    def read_runs(
        self, fd: Opened, tensor: TensorRef, target: memoryview, runs: Runs, bounce: memoryview
    ) -> None:
        length = (runs.count - 1) * runs.stride + runs.length
        found = self._part(tensor, runs.start, length)
        if found is None:
            super().read_runs(fd, tensor, target, runs, bounce)
            return
        shape = runs.count, runs.length
        np.frombuffer(target, np.uint8).reshape(shape)[:] = np.ndarray(
            shape, np.uint8, found, strides=(runs.stride, 1)
        )

    def _part(self, tensor: TensorRef, offset: int, length: int) -> U8 | None:
        first = tensor.offset + offset
        for span in self._spans:
            if span.file == tensor.file and span.start <= first:
                part = span.data[first - span.start : first - span.start + length]
                if len(part) == length:
                    return part
        return None


def _is_dense(matrix: ExpertMatrix) -> bool:
    """Whether its rows follow each other without gaps."""
    units = matrix.cols // matrix.element.unit_cols
    return matrix.col_stride == 1 and matrix.row_stride == units


def _merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges of bytes into ones that do not overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
