"""The work of quantize-cpu: one expert matrix quantized, packed, written and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ktconv import native
from ktconv.conversion.pipeline import Task
from ktconv.conversion.tasks import Advance, write_tensor
from ktconv.conversion.together import have_room
from ktconv.formats import FORMATS, Format, kinds_of
from ktconv.formats.folding import encode, folded_importance
from ktconv.quantize.packed.packing import PackingTask, Part, Piece
from ktconv.source import MoELayer
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import (
    Factors,
    MatrixReader,
    Scales,
    buffers_of,
    chunks,
    loaded_together,
)
from ktconv.system.arrays import F32, I8, U8
from ktconv.targets.packed.proof import Proof
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging


def quantize_buffers(layers: Sequence[MoELayer], fmt: Format) -> BufferSizes:
    """Buffers that a worker needs to quantize these layers."""
    layout, kinds = fmt.layout, (matrix for layer in layers for matrix in layer.kinds)
    return buffers_of(
        kinds,
        lambda one, rows: layout.weight_size(rows, one.cols) + layout.scale_size(rows, one.cols),
    )


class QuantizeTask(PackingTask, frozen=True, dict=True):
    """One projection of one expert: decode, quantize, pack, write, read back, compare."""

    importance: F32 | None = None  # [cols] of the matrix: what squared errors count
    exponents: I8 | None = None  # [I] of factors between up and down; None: nothing is folded

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        return quantize_together([self], staging, buffers, advance)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of packed codes and scales of all parts."""
        layout, shape = FORMATS[self.options.method].layout, self._owned(0).shape
        return self.options.numa * (layout.weight_size(*shape) + layout.scale_size(*shape))

    def source(self) -> MatrixReader:
        """The matrix as it is quantized."""
        return MatrixReader(
            self.reader,
            self.matrix,
            self.options.compat,
            self.options.keep_integers,
            None if self.exponents is None else Factors.of(self.proj, self.exponents),
        )

    def part(self, index: int, memory: U8 | None) -> Part:
        """A part; `memory` as `Part` takes it."""
        owned = self._owned(index)
        importance, rule = self._importance(), self.options.rule
        if importance is None:
            choice = native.Choice.plain(rule)
        else:
            choice = native.Choice(rule, importance).columns(owned.col_start, owned.col_stop)
        return self._new_part(index, owned.shape, choice, self._proof(choice), memory)

    def _importance(self) -> F32 | None:
        """Importance of the columns as they are quantized."""
        if self.exponents is None or self.proj != "down" or self.options.scale != "search":
            return self.importance
        return folded_importance(self.importance, self.exponents)

    def _proof(self, choice: native.Choice) -> Proof:
        """Conditions of a part whose columns have this choice."""
        return Proof.plain(choice.rule) if choice.importance is None else Proof(choice)

    def _facts(self, part: Part) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if part.check.kept_rows:
            facts["lossless_rows"] = part.check.kept_rows
        if self.exponents is not None and self.proj == "up":
            facts["fold"] = encode(self.exponents[part.owned.row_start : part.owned.row_stop])
        return facts

    def records(
        self, parts: Sequence[Part], bias: F32 | None, staging: Staging
    ) -> dict[str, Record]:
        """The manifest's records of what was written, and of each part's bias, which is written
        now: in float32, zeros where only other matrices of the layer have one."""
        records = self._records(parts)
        if not self.layer.biased:
            return records
        if bias is None:
            bias = np.zeros(self.matrix.rows, np.float32)
        for part in parts:
            if "bias" in kinds_of(self.proj, part.index, self.layer.biased):
                own = bias[part.owned.row_start : part.owned.row_stop].view(np.uint8)
                name = self._name(part, "bias")
                records[name] = write_tensor(name, [own], staging, self.verify)
        return records


def alone(task: Task) -> QuantizeTask | None:
    """The task if nothing but its rule for scales chooses codes: it can be run with others."""
    return task if type(task) is QuantizeTask else None


def quantize_together(
    tasks: Sequence[QuantizeTask], staging: Staging, buffers: Buffers, advance: Advance
) -> dict[str, Any]:
    """Convert matrices, in one step if buffers have room for all, else chunk by chunk; the
    manifest's records of their tensors."""
    whole = have_room(tasks, buffers)
    parts = _parts(tasks, buffers if whole else None)
    sources = [task.source() for task in tasks]
    scales = [source.load_scales() for source in sources]
    wanted = [
        _Chunk(task, source, scale, own, chunk)
        for task, source, scale, own in zip(tasks, sources, scales, parts, strict=True)
        for chunk in chunks(task.matrix, own[0].owned.shape[0])
    ]
    for step in [wanted] if whole else [[one] for one in wanted]:
        _quantize(step, staging, buffers)
        advance(sum(one.task.matrix.nbytes(len(one.rows)) for one in step))
    more = sum(task.source_bytes - task.matrix.nbytes(task.matrix.rows) for task in tasks)
    if more:  # block scales, biases
        advance(more)
    records: dict[str, Any] = {}
    for task, source, own in zip(tasks, sources, parts, strict=True):
        records |= task.records(own, source.load_bias(), staging)
    return records


class _Chunk(NamedTuple):
    """Rows of a matrix that is converted, with its scales and parts."""

    task: QuantizeTask
    source: MatrixReader
    scales: Scales | None
    parts: Sequence[Part]
    rows: range


def _parts(tasks: Sequence[QuantizeTask], buffers: Buffers | None) -> list[list[Part]]:
    """Parts of each matrix; with `buffers` packed there, the first parts of all before the second
    ones, as they lie in the output."""
    numa = tasks[0].options.numa
    sizes = [0 if buffers is None else task.packed_bytes // numa for task in tasks]
    total, found = sum(sizes), []
    for place, size, task in zip(accumulate(sizes, initial=0), sizes, tasks, strict=False):
        starts = range(place, place + numa * total, total) if buffers else [0] * numa
        memory = [None if buffers is None else buffers.packed[at : at + size] for at in starts]
        found.append([task.part(index, own) for index, own in enumerate(memory)])
    return found


def _quantize(step: Sequence[_Chunk], staging: Staging, buffers: Buffers) -> None:
    """Convert chunks; CheckpointError for a NaN or an infinity."""
    wanted = [(one.source, one.rows) for one in step]
    with loaded_together(wanted, buffers.source, buffers.bounce) as found:
        pieces: list[Piece] = []
        places = []
        used = 0
        for index in range(step[0].task.options.numa):
            for one, data in zip(step, found, strict=True):
                part, rows = one.parts[index], one.rows
                if not part.owned.row_start <= rows.start < part.owned.row_stop:
                    continue
                first_col, cols = part.owned.col_start, part.owned.shape[1]
                view = one.source.view(rows, one.scales, data, first_col, cols)
                piece = part.next_piece(view, buffers.packed[used:])
                used += piece.packed.nbytes
                pieces.append(piece)
                places.append((one.source, rows.start, first_col))
        try:
            step[0].task.write_pieces(pieces, staging, buffers)
        except native.NonFiniteError as error:
            source, row, col = places[error.matrix]
            raise source.not_finite(row + error.row, col + error.col) from error
