"""The matrices of backward passes: each part transposed, and quantized again (SPEC 2.4).

Rows have scales of their own, by the rule of the options alone. A row of a transposed matrix is an
input, and so what squared errors of that input count changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ktconv import native
from ktconv.conversion.pipeline import Task
from ktconv.conversion.tasks import Advance
from ktconv.formats import FORMATS, Matrix, Slice, backward_of, packed_shape, split
from ktconv.quantize.packed.packing import PackingTask, Part
from ktconv.quantize.packed.ways import Asked, Expert, Way
from ktconv.source import MoELayer
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.transposed import step_rows, transposed, transposed_bytes
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.target import Options, Plan
from ktconv.writer.staging import Staging


def backward_buffers(layers: Sequence[MoELayer], options: Options) -> BufferSizes:
    """Buffers that a worker needs for transposed matrices besides what the same layers need as they
    are."""
    layout = FORMATS[options.method].layout
    pieces = _pieces(layers, options)
    packed = [layout.weight_size(step_rows(*piece), piece[0]) for piece in pieces]
    return BufferSizes(0, max(packed, default=0), max((rows for rows, _ in pieces), default=1))


def backward_memory(layers: Sequence[MoELayer], options: Options) -> int:
    """Bytes of a worker besides its buffers."""
    return max((transposed_bytes(*piece) for piece in _pieces(layers, options)), default=0)


def _pieces(layers: Sequence[MoELayer], options: Options) -> set[tuple[int, int]]:
    """Shapes of what a part has of the matrices of these layers."""
    return {
        split(proj, layer.hidden_size, layer.intermediate_size, 0, options.numa).shape
        for layer in layers
        if not layer.intermediate_size % options.numa
        for proj in layer.projections
    }


class BackwardTask(PackingTask, frozen=True):
    """The transpose of one projection of one expert."""

    @property
    def packed_as(self) -> Matrix:
        (name,) = backward_of((self.proj,))
        return name

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        source = MatrixReader(self.reader, self.matrix, self.options.compat)
        parts = [self._part(index) for index in range(self.options.numa)]
        elements, done = self.matrix.rows * self.matrix.cols, 0
        with source.open() as fd:
            scales = source.load_scales()
            for part in parts:
                for first, view in transposed(source, fd, scales, part.owned, buffers):
                    try:
                        piece = part.next_piece(_turned(view), buffers.packed)
                        self.write_pieces([piece], staging, buffers)
                    except native.NonFiniteError as error:
                        raise source.not_finite(*_place(part.owned, first, error)) from error
                    before, done = done, done + view.rows * view.cols
                    total = self.source_bytes
                    advance(total * done // elements - total * before // elements)
        return self._records(parts)

    def _part(self, index: int) -> Part:
        layer, options = self.layer, self.options
        shape = packed_shape(
            self.packed_as, layer.hidden_size, layer.intermediate_size, options.numa
        )
        choice = native.Choice(options.rule)
        return self._new_part(index, shape, choice, Proof(choice))


def _turned(view: native.Matrix) -> native.Matrix:
    """Rows made contiguous: faster than to gather them for search and check. `verify` gathers them
    from the panel by code of its own."""
    return native.Matrix(
        native.decode(view).reshape(-1).view(np.uint8), "F32", view.rows, view.cols
    )


def _place(owned: Slice, first: int, error: native.NonFiniteError) -> tuple[int, int]:
    """Row and column of the source of an element of rows from `first` on of a transpose."""
    return owned.row_start + error.col, owned.col_start + first + error.row


class Backward(Way):
    """`--save-backward`, as a conversion uses it."""

    @staticmethod
    def open(asked: Asked) -> Backward | None:
        return Backward() if asked.options.save_backward else None

    def notes(self, plan: Plan) -> list[str]:
        options = plan.target.options
        notes = [
            "backward matrices are quantized from the source, which is read a second time for "
            "them, not from the forward codes, and so their weights differ a little from those of "
            "the forward pass"
        ]
        for option, given in (("importance", options.importance), ("calibrate", options.calibrate)):
            if given is not None:
                notes.append(
                    f"--{option} knows inputs, not gradients: the scales of backward matrices make "
                    "their plain squared error smallest"
                )
        return notes

    def worker_memory(self, plan: Plan) -> int:
        return backward_memory(plan.moe_layers, plan.target.options)

    def buffers(self, plan: Plan) -> BufferSizes:
        return backward_buffers(plan.moe_layers, plan.target.options)

    def more_tasks(self, expert: Expert) -> list[Task]:
        one = expert
        return [
            BackwardTask(one.reader, one.layer, one.number, proj, one.verify, one.options)
            for proj in one.layer.projections
        ]
