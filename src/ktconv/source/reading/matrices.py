"""Expert matrices read chunk by chunk: bytes of a checkpoint as views for the C library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.errors import CheckpointError, ResourceError
from ktconv.formats.folding import factors
from ktconv.source import BlockGrid, ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.source.elements import F32 as ELEMENT_F32
from ktconv.source.encodings.grids import (
    count_zeros,
    grid_nbytes,
    load_block_scale,
    load_grid,
    load_groups,
    load_outer_scale,
    load_outer_value,
    load_zero_points,
    scale_span,
    scan_block_scale,
)
from ktconv.source.reading.buffers import BufferSizes, whole_lines
from ktconv.source.reading.reader import BOUNCE_BYTES, Runs, SourceReader, Span
from ktconv.source.types import DeclaredShape, OuterScale
from ktconv.system.arrays import F32, I8, I32, U8
from ktconv.system.opened import Opened

CHUNK_BYTES = 4 << 20  # of source: small enough for the cache, large enough for the disk
STRIDED_CHUNK_BYTES = 16 << 20  # where a chunk is gathered from many short runs
_LEAST_E4M3 = 2.0**-9  # above zero: what second scales are beside
ROWS_STEP = 128  # chunks are whole row blocks of every format


class Scales(Struct, frozen=True):
    """Arrays that `ExpertMatrix.quantization` names; grids start at element (0, 0)'s block."""

    scale: F32  # both levels
    zero_point: F32 | None = None
    group_of_col: I32 | None = None
    row_scale: F32 | None = None  # [rows]: weights are integers times these


class Factors(Struct, frozen=True):
    """Factors of the rows and columns of a whole matrix; None: ones."""

    rows: F32 | None = None
    cols: F32 | None = None

    @staticmethod
    def of(projection: Projection, exponents: I8) -> Factors | None:
        """Factors of folding (SPEC 9) by exponents [I]; None of a gate, which has none."""
        if projection == "gate":
            return None
        if projection == "up":
            return Factors(rows=factors(exponents))
        return Factors(cols=factors(-exponents.astype(np.int64)))


_ONES = Factors()


def chunks(matrix: ExpertMatrix, part_rows: int) -> Iterator[range]:
    """Ranges of rows that fit the buffers; none has rows of two parts of `part_rows` rows."""
    rows = chunk_rows(matrix)
    for part in range(0, matrix.rows, part_rows):
        for start in range(part, part + part_rows, rows):
            yield range(start, min(start + rows, part + part_rows))


def chunk_rows(matrix: ExpertMatrix) -> int:
    """Rows per chunk: as many whole row blocks as fit the target size, at least one."""
    target = CHUNK_BYTES if matrix.col_stride == 1 else STRIDED_CHUNK_BYTES
    return max(1, target // buffer_bytes(matrix, ROWS_STEP)) * ROWS_STEP


def buffer_bytes(matrix: ExpertMatrix, rows: int) -> int:
    """Bytes of `rows` as `MatrixReader.read` leaves them: as in the source, but float32 where
    the package gguf decodes them."""
    return rows * matrix.cols * 4 if matrix.element.by_package else matrix.nbytes(rows)


def buffers_of(
    matrices: Iterable[ExpertMatrix], packed: Callable[[ExpertMatrix, int], int] | None = None
) -> BufferSizes:
    """Buffers for reading any of these matrices, a chunk of rows at a time; `packed`: bytes that
    some rows of one become."""
    found = BufferSizes()
    for matrix in matrices:
        rows = min(chunk_rows(matrix), matrix.rows)
        more = (packed(matrix, rows), matrix.cols) if packed else ()
        found = found.with_those_of(BufferSizes(buffer_bytes(matrix, rows), *more))
    return found


def experts_bytes(layer: MoELayer, experts: Sequence[int] | None = None) -> int:
    """Bytes of some of a layer's experts in the source, None: of all."""
    chosen = range(len(layer.experts)) if experts is None else experts
    if len(layer.encodings) == 1:  # so all have as many
        return sum(map(source_bytes, layer.experts[0].values())) * len(chosen)
    return sum(source_bytes(matrix) for one in chosen for matrix in layer.experts[one].values())


def source_bytes(matrix: ExpertMatrix) -> int:
    """Bytes of a matrix in the source, with scales, zero points and groups."""
    total, found = matrix.nbytes(matrix.rows), matrix.quantization
    if matrix.bias is not None:
        total += grid_nbytes(matrix.bias, matrix.rows, 1)
    if found is None:
        return total
    for grid in (found.scale, found.zero_point):
        if isinstance(grid, BlockGrid):
            total += grid_nbytes(grid, matrix.rows, matrix.cols)
    total += 4 * matrix.cols if found.groups is not None else 0
    return total + (4 if found.scale.outer is not None else 0)


def spans_of(matrix: ExpertMatrix) -> list[Span]:
    """Spans that reading a matrix touches: the bytes from its first to its last one, and its scales
    and what belongs to them, in the order of reading."""
    spans = [] if matrix.bias is None else [_grid_span(matrix.bias, matrix.rows, 1)]
    found = matrix.quantization
    if found is not None:
        grids = [one for one in (found.scale, found.zero_point) if isinstance(one, BlockGrid)]
        spans += [_grid_span(grid, matrix.rows, matrix.cols) for grid in grids]
        if found.groups is not None:
            spans.append(_part(found.groups.tensor, 4 * found.groups.start, 4 * matrix.cols))
        if (outer := found.scale.outer) is not None:
            spans.append(_part(outer.tensor, 4 * outer.index, 4))
    return [*spans, Span(matrix.tensor.file, *matrix.extent)]


def _grid_span(grid: BlockGrid, rows: int, cols: int) -> Span:
    return _part(grid.tensor, *scale_span(grid, rows, cols))


def _part(tensor: TensorRef, offset: int, nbytes: int) -> Span:
    return Span(tensor.file, tensor.offset + offset, nbytes)


class MatrixReader(Struct, frozen=True):
    """Reads one matrix; `round_to_bf16` rounds values first, as the reference converter does."""

    reader: SourceReader
    matrix: ExpertMatrix
    round_to_bf16: bool = False
    keep_integers: bool = False  # with their row scales, where the packed format includes them
    factors: Factors | None = None  # of weights and bias; integers are not kept under them

    def open(self) -> AbstractContextManager[Opened]:
        """A descriptor of the matrix's file."""
        return self.reader.open(self.matrix.tensor.file)

    def load_scales(self) -> Scales | None:
        """Load its scales and what belongs to them, if it has some."""
        found, (rows, cols) = self.matrix.quantization, (self.matrix.rows, self.matrix.cols)
        if found is None:
            return None
        scale = load_block_scale(found.scale, rows, cols, self._grid(found.scale))
        zero_point = groups = None
        if isinstance(found.zero_point, int):
            zero_point = np.full_like(scale, found.zero_point)
        elif found.zero_point is not None:
            grid = found.zero_point
            zero_point = load_zero_points(grid, rows, cols, self._grid(grid))
        if found.groups is not None:
            index = self._bytes(found.groups.tensor, 4 * found.groups.start, 4 * cols)
            groups = load_groups(found.groups, found.scale, scale.shape[1], index)
        if found.declared is not None:
            self._check_declared(found.declared)
        outer = found.scale.outer
        if outer is not None:
            scale = load_outer_scale(outer, scale, self._outer(outer))
        self.reader.found_zeros(found.scale, count_zeros(scale))
        return Scales(scale, zero_point, groups, self._row_scale(scale, zero_point, groups))

    def load_levels(self) -> tuple[F32, float, bool]:
        """The scales of a matrix with a second one: those of blocks alone, then the second, and
        whether it divides them."""
        scale = self.matrix.scale
        assert scale is not None and scale.outer is not None
        outer, (rows, cols) = scale.outer, (self.matrix.rows, self.matrix.cols)
        blocks = load_block_scale(scale, rows, cols, self._grid(scale))
        data = self._outer(outer)
        both = load_outer_scale(outer, blocks, data)  # refuses what is no scale
        self.reader.found_zeros(scale, count_zeros(both))
        return blocks, float(load_outer_value(outer, data)), outer.divides

    def scan_scales(self) -> int:
        """Count the zero scales of a matrix. CheckpointError for a scale, or a zero point that is a
        float, which `load_scales` refuses; the rest of what belongs to a matrix is not looked
        at."""
        scale, (rows, cols) = self.matrix.scale, (self.matrix.rows, self.matrix.cols)
        if scale is None:
            return 0
        zero = self.matrix.quantization.zero_point if self.matrix.quantization else None
        if isinstance(zero, BlockGrid) and zero.number == "F32":
            load_zero_points(zero, rows, cols, self._grid(zero))
        data = self._grid(scale)
        zeros, most = scan_block_scale(scale, rows, cols, data)
        if scale.outer is None:
            return zeros
        value = load_outer_value(scale.outer, self._outer(scale.outer))
        with np.errstate(all="ignore"):
            combine = np.divide if scale.outer.divides else np.multiply
            least, largest = (combine(np.float32(one), value) for one in (_LEAST_E4M3, most))
        if least > 0 and np.isfinite(largest):
            return zeros
        blocks = load_block_scale(scale, rows, cols, data)
        return count_zeros(load_outer_scale(scale.outer, blocks, self._outer(scale.outer)))

    def _outer(self, outer: OuterScale) -> bytearray:
        return self._bytes(outer.tensor, 4 * outer.index, 4)

    def _check_declared(self, declared: DeclaredShape) -> None:
        tensor = declared.tensor
        size = 8 if tensor.dtype == "I64" else 4
        found = np.frombuffer(self._bytes(tensor, size * declared.start, 2 * size), f"<i{size}")
        if tuple(found) != declared.shape:
            raise CheckpointError(
                f"{tensor.name} says {found.tolist()}, but {self.matrix.tensor.name} has "
                f"{declared.shape[0]} x {declared.shape[1]} weights",
                "The checkpoint is damaged; download it again.",
            )

    def load_bias(self) -> F32 | None:
        """Load the bias of its outputs, [rows], if there is one. CheckpointError for a NaN or an
        infinity."""
        grid, rows = self.matrix.bias, self.matrix.rows
        if grid is None:
            return None
        bias = load_grid(grid, rows, 1, self._bytes(grid.tensor, *scale_span(grid, rows, 1)))[:, 0]
        if not np.isfinite(bias).all():
            output = int(np.argwhere(~np.isfinite(bias))[0, 0])
            raise CheckpointError(
                f"tensor {grid.tensor.name} in {grid.tensor.file} contains a NaN or an infinity "
                f"at number {grid.start + output * grid.row_stride}",
                "download the file again; if the original contains it, the model cannot be "
                "converted",
            )
        if self.factors is not None and self.factors.rows is not None:
            with np.errstate(over="ignore"):
                bias = bias * self.factors.rows
            if not np.isfinite(bias).all():
                raise _beyond(grid.tensor, "a bias", folded=True)
        return np.ascontiguousarray(bias)

    def _row_scale(self, scale: F32, zero_point: F32 | None, groups: I32 | None) -> F32 | None:
        """The scale of each row, if all weights are signed integers times that."""
        zero = self.matrix.element.integer_zero
        if zero is None or groups is not None or scale.shape[1] != 1:
            return None
        if zero_point is None and zero:
            return None
        if zero_point is not None and not (zero_point == zero).all():
            return None
        grid = self.matrix.scale
        assert grid is not None
        rows = (grid.row_origin % grid.block_rows + np.arange(self.matrix.rows)) // grid.block_rows
        return np.ascontiguousarray(scale[rows, 0])

    def _grid(self, grid: BlockGrid) -> bytearray:
        return self._bytes(grid.tensor, *scale_span(grid, self.matrix.rows, self.matrix.cols))

    def _bytes(self, tensor: TensorRef, offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        with self.reader.open(tensor.file) as fd:
            self.reader.read(fd, tensor, memoryview(data), offset)
        return data

    def finite(self, values: F32, first: int) -> F32:
        """`values`, whose rows begin with `first`. CheckpointError for a NaN or an infinity."""
        if not np.isfinite(values).all():
            row, col = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
            raise self.not_finite(first + row, col)
        return values

    @contextmanager
    def only_finite(self, row: int = 0, col: int = 0) -> Iterator[None]:
        """CheckpointError for a NaN or an infinity in a view that begins at (row, col)."""
        try:
            yield
        except native.NonFiniteError as error:
            raise self.not_finite(row + error.row, col + error.col) from error

    def not_finite(self, row: int, col: int) -> CheckpointError:
        """Error for the value at (row, col), a NaN or an infinity, with the reason."""
        tensor, matrix = self.matrix.tensor, self.matrix
        unit = matrix.element
        at = matrix.start + row // unit.unit_rows * matrix.row_stride
        at += col // unit.unit_cols * matrix.col_stride
        flat = at * unit.items + (col % unit.unit_cols if unit.items == unit.unit_cols else 0)
        position = ", ".join(str(int(i)) for i in np.unravel_index(flat, tensor.shape))
        scales, scale = self.load_scales(), matrix.scale
        if (self.factors is not None or self.round_to_bf16) and math.isfinite(
            value := self._as_stored(row, col)
        ):
            return _beyond(tensor, f"{value:.4g} at [{position}]", self.factors is not None)
        if scales is not None and scale is not None and self._is_finite(at, col % unit.unit_cols):
            block_row, block_col = _origin(scale, row, col)
            group = block_col // scale.block_cols
            if scales.group_of_col is not None:
                group = int(scales.group_of_col[col])
            factor = scales.scale[block_row // scale.block_rows, group]
            return CheckpointError(
                f"tensor {tensor.name} in {tensor.file}: the value at [{position}] times its "
                f"scale {factor:.4g} in {scale.tensor.name} is beyond float32",
                "download the files again; if the original contains it, the model cannot "
                "be quantized",
            )
        return CheckpointError(
            f"tensor {tensor.name} in {tensor.file} contains a NaN or an infinity at [{position}]",
            "download the file again; if the original contains it, the model cannot be quantized",
        )

    def _as_stored(self, row: int, col: int) -> float:
        """The weight at (row, col) as the model has it, without factors, and not rounded."""
        plain, unit = MatrixReader(self.reader, self.matrix), self.matrix.element
        first = row // unit.unit_rows * unit.unit_rows
        chunk = range(first, first + unit.unit_rows)
        data, scales = plain.read_alone(chunk)
        view = plain.view(chunk, scales, data, 0, self.matrix.cols)
        return float(native.decode(view)[row - first, col])

    def _is_finite(self, at: int, col: int) -> bool:
        """Whether column `col` of unit `at` of the tensor is, before it is scaled."""
        unit = self.matrix.element
        stored = bytearray(unit.unit_bytes)
        with self.open() as fd:
            self.reader.read(fd, self.matrix.tensor, memoryview(stored), at * unit.unit_bytes)
        data, one = np.frombuffer(stored, np.uint8), np.ones((1, 1), np.float32)
        shape = unit.unit_rows, unit.unit_cols
        if unit.by_package:
            values = decode_blocks(unit.name, data[None])
        else:
            view = native.Matrix(data, unit.name, *shape, block_scale=one, block=shape)
            values = native.decode(view)
        return bool(np.isfinite(values[:, col]).all())

    def read(self, fd: Opened, chunk: range, target: U8, bounce: U8) -> int:
        """Read the rows of `chunk` into `target`, densely packed in their own orientation, and
        decoded if the package gguf does that; returns the number of bytes read."""
        matrix, unit = self.matrix, self.matrix.element
        if unit.by_package:
            stored = np.empty((len(chunk), matrix.nbytes(1)), np.uint8)
            count = self._read_stored(fd, chunk, stored.data.cast("B"), bounce)
            decoded = target[: buffer_bytes(matrix, len(chunk))].view(np.float32)
            decoded.reshape(len(chunk), matrix.cols)[:] = decode_blocks(unit.name, stored)
            return count
        return self._read_stored(fd, chunk, target.data[: matrix.nbytes(len(chunk))], bounce)

    def read_alone(self, rows: range) -> tuple[U8, Scales | None]:
        """Some rows as `read` leaves them, in a buffer of their own, and the scales."""
        data = np.empty(buffer_bytes(self.matrix, len(rows)), np.uint8)
        with self.open() as fd:
            scales = self.load_scales()
            self.read(fd, rows, data, np.empty(BOUNCE_BYTES, np.uint8))
        return data, scales

    def begin(self, chunk: range) -> int | None:
        """The byte of the tensor at which the rows of `chunk` lie as `read` leaves them; None: they
        do not lie so."""
        matrix, unit = self.matrix, self.matrix.element
        if unit.by_package or matrix.col_stride != 1:
            return None
        if matrix.row_stride * unit.unit_cols != matrix.cols:
            return None
        return (matrix.start + chunk.start // unit.unit_rows * matrix.row_stride) * unit.unit_bytes

    @contextmanager
    def loaded(
        self, fd: Opened, chunk: range, target: U8, bounce: U8, nbytes: int = 0
    ) -> Iterator[U8]:
        """The rows of `chunk` as `read` leaves them, inside the block: mapped where they lie so in
        a file of this machine, else read into `target`; up to `nbytes` with what follows there."""
        matrix, start = self.matrix, self.begin(chunk)
        mapped, size = None, max(nbytes, matrix.nbytes(len(chunk)))
        if start is not None:
            mapped = self.reader.mapped(fd, matrix.tensor, size, start)
        if mapped is None or start is None:
            if start is None:
                self.read(fd, chunk, target, bounce)
            else:
                self.reader.read(fd, matrix.tensor, target[:size].data, start)
            yield target
            return
        try:
            yield mapped.data
        finally:  # also where something failed: that can be the doing of what was lost
            self.reader.refuse_lost(fd, matrix.tensor, start, mapped)

    def _read_stored(self, fd: Opened, chunk: range, data: memoryview, bounce: U8) -> int:
        matrix, unit = self.matrix, self.matrix.element
        rows, cols = len(chunk) // unit.unit_rows, matrix.cols // unit.unit_cols
        if matrix.col_stride == 1:
            runs, run_length, stride = rows, cols, matrix.row_stride
        else:
            runs, run_length, stride = cols, rows, matrix.col_stride
        start = matrix.start + chunk.start // unit.unit_rows * matrix.row_stride
        size = unit.unit_bytes
        if matrix.col_stride != 1 and unit.items > 1:
            # The words of a unit are in rows of their own.
            size //= unit.items
            where = Runs(start * size, rows * size, stride * size, runs * unit.items)
            self.reader.read_runs(fd, matrix.tensor, data, where, bounce.data)
            words = np.frombuffer(data, f"V{size}").reshape(runs, unit.items, rows)
            data[:] = words.swapaxes(1, 2).tobytes()
            return len(data)
        apart = matrix.row_stride if matrix.col_stride != 1 else 1
        if apart != 1:  # every second output is of another matrix
            width = (run_length - 1) * apart + 1
            all_rows = np.empty(runs * width, f"V{size}")
            where = Runs(start * size, width * size, stride * size, runs)
            self.reader.read_runs(fd, matrix.tensor, all_rows.data.cast("B"), where, bounce.data)
            own = all_rows.reshape(runs, width)[:, ::apart]
            np.frombuffer(data, f"V{size}").reshape(own.shape)[:] = own
            return len(data)
        where = Runs(start * size, run_length * size, stride * size, runs)
        self.reader.read_runs(fd, matrix.tensor, data, where, bounce.data)
        return len(data)

    def decoded(
        self, buffer: U8 | None = None, bounce: U8 | None = None
    ) -> Iterator[tuple[range, F32]]:
        """All rows as float32, a chunk at a time; see `views`."""
        for chunk, view in self.views(buffer, bounce):
            yield chunk, native.decode(view)

    def views(
        self, buffer: U8 | None = None, bounce: U8 | None = None
    ) -> Iterator[tuple[range, native.Matrix]]:
        """Chunks as views for the C library; a view is good until the next one. `buffer` is large
        enough for any chunk; without it and `bounce` there are buffers for this matrix alone."""
        if buffer is None or bounce is None:
            rows = min(chunk_rows(self.matrix), self.matrix.rows)
            buffer = np.empty(buffer_bytes(self.matrix, rows), np.uint8)
            bounce = np.empty(BOUNCE_BYTES, np.uint8)
        with self.open() as fd:
            scales = self.load_scales()
            for chunk in chunks(self.matrix, self.matrix.rows):
                with self.loaded(fd, chunk, buffer, bounce) as data:
                    yield chunk, self.view(chunk, scales, data, 0, self.matrix.cols)

    def _kept(self, scales: Scales | None, chunk: range) -> F32 | None:
        if scales is None or scales.row_scale is None or not self.keep_integers or self.factors:
            return None
        return scales.row_scale[chunk.start : chunk.stop]

    def view(
        self, chunk: range, scales: Scales | None, data: U8, first_col: int, cols: int
    ) -> native.Matrix:
        """Columns from `first_col` on of the chunk that `read` or `loaded` left in `data`."""
        matrix, unit, rows = self.matrix, self.matrix.element, len(chunk)
        if unit.by_package:  # `read` has decoded them
            unit = ELEMENT_F32
        row_stride, col_stride = matrix.cols // unit.unit_cols, 1
        if matrix.col_stride != 1:
            row_stride, col_stride = 1, rows // unit.unit_rows
        scale, groups = matrix.scale, scales.group_of_col if scales else None
        own = self.factors or _ONES
        is_bf16 = unit.name == "BF16" and scale is None  # rounding would leave it as it is
        return native.Matrix(
            data,
            unit.name,
            rows,
            cols,
            start=first_col // unit.unit_cols * col_stride,
            row_stride=row_stride,
            col_stride=col_stride,
            first_col=first_col % unit.unit_cols,
            block_scale=scales.scale if scales else None,
            block=(scale.block_rows, scale.block_cols) if scale else (1, 1),
            origin=_origin(scale, chunk.start, first_col),
            zero_point=scales.zero_point if scales else None,
            group_of_col=None if groups is None else groups[first_col : first_col + cols],
            row_scale=self._kept(scales, chunk),
            row_factor=None if own.rows is None else own.rows[chunk.start : chunk.stop],
            col_factor=None if own.cols is None else own.cols[first_col : first_col + cols],
            round_to_bf16=self.round_to_bf16 and not is_bf16,
        )


_ELEMENT = 8  # bytes; what follows a multiple of that is aligned for its elements


@contextmanager
def loaded_together(
    wanted: Sequence[tuple[MatrixReader, range]], target: U8, bounce: U8
) -> Iterator[list[U8]]:
    """Each of these chunks as `MatrixReader.loaded` has it, inside the block. Those that lie one
    behind the other in a file are mapped or read at once."""
    found: list[U8] = [target] * len(wanted)
    used = 0
    with ExitStack() as stack:
        for run in _neighbours(wanted):
            reader, chunk = wanted[run[0]]
            sizes = [buffer_bytes(wanted[i][0].matrix, len(wanted[i][1])) for i in run]
            together = sum(sizes) if len(run) > 1 else 0
            room = target[used:]
            fd = stack.enter_context(reader.open())
            stack.enter_context(_naming([wanted[i] for i in run], fd, room, bounce))
            data = stack.enter_context(reader.loaded(fd, chunk, room, bounce, together))
            if data is room:
                used += whole_lines(sum(sizes))
            for i, start in zip(run, accumulate(sizes, initial=0), strict=False):
                found[i] = data[start:]
        yield found


@contextmanager
def _naming(
    run: Sequence[tuple[MatrixReader, range]], fd: Opened, room: U8, bounce: U8
) -> Iterator[None]:
    """Raise the error of the chunk that cannot be read inside the block, among chunks that lie one
    behind the other; what is read at once has the name of the first."""
    try:
        yield
    except ResourceError:
        if len(run) > 1 and fd.descriptor is not None:  # others repeat requests for long already
            for reader, chunk in run:
                reader.read(fd, chunk, room, bounce)
        raise


def _neighbours(wanted: Sequence[tuple[MatrixReader, range]]) -> list[list[int]]:
    """Indices of chunks, those together that lie one behind the other in a file."""
    if len(wanted) == 1:
        return [[0]]
    places: list[tuple[str, int, int]] = []
    runs: list[list[int]] = []
    for index, (reader, chunk) in enumerate(wanted):
        start = reader.begin(chunk)
        if start is None:
            runs.append([index])
        else:
            tensor = reader.matrix.tensor
            places.append((str(tensor.file), tensor.offset + start, index))
    end: tuple[str, int] | None = None
    for file, start, index in sorted(places):
        reader, chunk = wanted[index]
        if (file, start) == end:
            runs[-1].append(index)
        else:
            runs.append([index])
        size = reader.matrix.nbytes(len(chunk))
        end = (file, start + size) if size % _ELEMENT == 0 else None
    return runs


def _beyond(tensor: TensorRef, what: str, folded: bool) -> CheckpointError:
    where = f"tensor {tensor.name} in {tensor.file}: {what}"
    if folded:
        return CheckpointError(
            f"{where} times the factor that --fold chose is beyond float32", "omit --fold"
        )
    return CheckpointError(
        f"{where} is beyond bf16, to which weights are rounded first",
        "use a format that does not round to bf16 first, such as --method fp8; such a weight is "
        "probably damaged",
    )


def _origin(scale: BlockGrid | None, row: int, col: int) -> tuple[int, int]:
    """The position of element (row, col) of a matrix in its grid of block scales, in elements.

    `load_grid` starts the grid at the block of element (0, 0).
    """
    if scale is None:
        return 0, 0
    return scale.row_origin % scale.block_rows + row, scale.col_origin % scale.block_cols + col


def decode_blocks(name: str, blocks: U8) -> F32:
    """Rows of blocks [rows, bytes] of ggml's type `name` as float32 [rows, cols], by the package
    gguf, which has the tables of types with tables."""
    import gguf

    with np.errstate(all="ignore"):  # what is not finite will be found
        values: F32 = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return np.ascontiguousarray(values, np.float32)
