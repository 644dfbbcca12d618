"""Values of packed matrices as float32, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ktconv import native
from ktconv.formats import PROJECTIONS, Format, Projection, matrix_shape, reference, scales, split
from ktconv.native import Expert, PackedMatrix
from ktconv.source.reading.streamed import Piece, Streamed, Streams, piece_rows
from ktconv.system.arrays import F32


def packed_streams(fmt: Format, hidden: int, intermediate: int, parts: Sequence[Expert]) -> Streams:
    """The weights and biases of an expert, of the packed matrices of its parts."""

    def streamed(proj: Projection) -> Streamed:
        index = PROJECTIONS.index(proj)
        matrices = [matrix for part in parts if (matrix := part[index]) is not None]
        biases = [bias for matrix in matrices if (bias := matrix.bias) is not None]
        return Streamed(
            *matrix_shape(proj, hidden, intermediate),
            partial(_pieces, fmt, proj, hidden, intermediate, matrices),
            np.concatenate(biases) if biases else None,
        )

    gate = None if parts[0][0] is None else streamed("gate")
    return gate, streamed("up"), streamed("down")


def _pieces(
    fmt: Format,
    proj: Projection,
    hidden: int,
    intermediate: int,
    matrices: Sequence[PackedMatrix],
) -> Iterator[Piece]:
    for part, matrix in enumerate(matrices):
        place = split(proj, hidden, intermediate, part, len(matrices))
        rows, cols = place.shape
        for first in range(0, rows, piece_rows(cols)):
            here = slice(first, min(first + piece_rows(cols), rows))
            values = _unpacked(fmt, matrix, here, cols)
            start = place.row_start
            yield Piece(slice(start + here.start, start + here.stop), place.index[1], values)


def _unpacked(fmt: Format, matrix: PackedMatrix, rows: slice, cols: int) -> F32:
    """The values of some rows: whole row blocks, which are consecutive in memory."""
    layout, count = fmt.layout, rows.stop - rows.start
    start, stop = (layout.weight_size(row, cols) for row in (rows.start, rows.stop))
    packed = matrix.codes[start:stop]
    start, stop = (layout.scale_size(row, cols) for row in (rows.start, rows.stop))
    packed_scale = None if matrix.scale is None else matrix.scale[start:stop]
    if not fmt.traits.max_level or packed_scale is None:
        plain, scale = native.unpack_weight(layout, count, cols, packed, packed_scale)
        return reference.dequantize(fmt, plain, scale)
    codes = native.audit_codes(layout, packed, count, cols)  # by a path of its own
    step = scales.values(fmt, scales.ordered(fmt, packed_scale, count, cols))
    step = step * np.float32(fmt.traits.scale_units)
    values: F32 = codes * np.repeat(step, cols // step.shape[1], axis=1)
    return values
