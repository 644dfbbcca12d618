"""Rows of experts that stand for a model, read within a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from ktconv.conversion.plan import LayerUnit
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.source.reading.matrices import ROWS_STEP, source_bytes
from ktconv.source.reading.reader import SourceReader
from ktconv.system.opened import Opened

STEP = 32  # rows: formats quantize whole strips of so many
PAGE_BYTES = 4096  # what a disk reads at least


class Limits(Struct, frozen=True):
    """Limits on what an estimate reads and computes.

    A disk that reads 100 MB/s and seeks in 10 ms needs half a minute for 512 MiB in 1500 places
    with as many places of scales; a slower one is stopped by `seconds`.
    """

    seconds: float = 40.0
    cost: int = 512 << 20  # bytes, see `cost_of`
    matrices: int = 1500
    rows: int = 2 * ROWS_STEP  # of a matrix: more experts tell more than more rows
    seed: int = 0


class Sample(Struct, frozen=True):
    """Neighbouring rows of one matrix."""

    layer: MoELayer
    expert: int
    proj: Projection
    rows: range

    @property
    def matrix(self) -> ExpertMatrix:
        return self.layer.experts[self.expert][self.proj]

    @property
    def cell(self) -> tuple[int, Projection]:
        """The (layer, projection) that this sample was drawn from."""
        return self.layer.index, self.proj


def draw(units: Sequence[LayerUnit], limits: Limits) -> list[Sample]:
    """Rows of some experts of every layer and projection, the same at every call.

    Ordered so that a beginning of the list has all of them as evenly as possible. One expert of
    each layer is drawn even where that is beyond `limits.cost`.
    """
    units = [unit for unit in units if unit.experts]
    first = [unit.layer.experts[unit.experts[0]] for unit in units]
    least = sum(cost_of(matrix, STEP) for expert in first for matrix in expert.values())
    cells = sum(map(len, first))
    experts = max(1, min(limits.matrices // cells, limits.cost // least))
    counts = [min(experts, len(unit.experts)) for unit in units]
    share = limits.cost // sum(n * len(one) for n, one in zip(counts, first, strict=True))
    drawn = [
        _of_layer(unit, count, share, limits) for unit, count in zip(units, counts, strict=True)
    ]
    order = np.random.default_rng(limits.seed).permutation(len(units))
    turns = ((drawn[i], turn) for turn in range(max(counts)) for i in order)
    return [sample for layer, turn in turns if turn < len(layer) for sample in layer[turn]]


def _of_layer(unit: LayerUnit, count: int, share: int, limits: Limits) -> list[list[Sample]]:
    """Samples of `count` experts of a layer, expert by expert."""
    random = np.random.default_rng((limits.seed, unit.layer.index))
    chosen = random.permutation(len(unit.experts))[:count]
    return [_of_expert(unit.layer, unit.experts[i], share, limits, random) for i in chosen]


def _of_expert(
    layer: MoELayer, expert: int, share: int, limits: Limits, random: np.random.Generator
) -> list[Sample]:
    samples = []
    for proj, matrix in layer.experts[expert].items():
        count = _rows_for(matrix, share, limits.rows)
        start = STEP * int(random.integers((matrix.rows - count) // STEP + 1))
        samples.append(Sample(layer, expert, proj, range(start, start + count)))
    return samples


def _rows_for(matrix: ExpertMatrix, share: int, most: int) -> int:
    """Number of rows that cost no more than `share`, or than the fewest do."""
    allowed = max(share, cost_of(matrix, STEP))
    counts = range(STEP, min(most, matrix.rows) + 1, STEP)
    return max((rows for rows in counts if cost_of(matrix, rows) <= allowed), default=STEP)


def cost_of(matrix: ExpertMatrix, rows: int) -> int:
    """Bytes that reading `rows` makes a disk read, with all scales of the matrix, and 2 at least
    for every weight, for the arithmetic."""
    beside = source_bytes(matrix) - matrix.nbytes(matrix.rows)
    return max(_touched(matrix, rows) + beside, 2 * rows * matrix.cols)


def _touched(matrix: ExpertMatrix, rows: int) -> int:
    """Bytes of the pages with these rows. Of a matrix that is stored [in, out] every input has
    some in a page of its own."""
    if matrix.col_stride == 1:
        return matrix.nbytes(rows)
    unit = matrix.element
    runs = matrix.cols // unit.unit_cols * unit.items
    run = rows // unit.unit_rows * matrix.row_stride * unit.unit_bytes // unit.items
    return min(runs * max(run, PAGE_BYTES), matrix.extent[1])


class OutOfTimeError(Exception):
    """The time for reading is over."""


class TimedReader(SourceReader):
    """Reads until a deadline, and counts bytes. Threads may share one."""

    maps = False

    def __init__(self, checkpoint: Checkpoint, seconds: float) -> None:
        super().__init__(checkpoint.files, checkpoint.sources)
        self._deadline = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.bytes_read = 0

    def stop(self) -> None:
        """Let all threads end at their next read."""
        self._deadline = 0.0

    def read(self, fd: Opened, tensor: TensorRef, target: memoryview, offset: int) -> None:
        """Raises OutOfTimeError after the deadline."""
        if time.monotonic() > self._deadline:
            raise OutOfTimeError
        super().read(fd, tensor, target, offset)
        with self._lock:
            self.bytes_read += len(target)
