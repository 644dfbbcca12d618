"""Encoded matrices of layouts that only the manifest tells, as they lie in an output."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.quantize.encoded.stored import stored_matrix
from ktconv.source import ExpertMatrix
from ktconv.source.reading.streamed import Piece
from ktconv.system.arrays import U8
from ktconv.targets.encoded.layouts.base import Sizes
from ktconv.targets.encoded.scheme import Scheme
from ktconv.targets.encoded.target import weight_dtype
from ktconv.verify.encoded.output import Module
from ktconv.verify.reading import read_tensor

_PIECE = 1 << 20  # weights at a time


class StoredParts(Struct, frozen=True):
    """Scales of a whole matrix, and where its codes are."""

    scheme: Scheme
    module: Module
    sizes: Sizes
    half: bool  # whether the source's weights are f16
    scales: U8  # [scale rows, bytes]
    factor: float
    zeros: U8 | None  # [rows, groups]

    def matrix(self, rows: range, codes: U8) -> native.Matrix:
        """Rows that begin and end with a block of scales, for the C library."""
        here = self.scales_of(rows)
        codes = codes.reshape(len(rows), -1)
        zeros = None if self.zeros is None else self.zeros[rows.start : rows.stop]
        return stored_matrix(
            self.scheme, codes, here, self.sizes.cols, self.half, self.factor, zeros
        )

    def scales_of(self, rows: range) -> U8:
        block = self.scheme.row.block
        return np.ascontiguousarray(self.scales[rows.start // block : -(-rows.stop // block)])

    def pieces(self) -> Iterator[Piece]:
        """Values, piece by piece."""
        sizes, block = self.sizes, max(self.scheme.row.block, 32)
        step = max(1, _PIECE // sizes.cols // block) * block
        codes = self.module.parts[self.scheme.layout.parts[0]]
        whole = None
        if not self.scheme.layout.streamed:
            whole = self.scheme.layout.codes(read_tensor(codes), sizes)
        for first in range(0, sizes.rows, step):
            rows = range(first, min(first + step, sizes.rows))
            if whole is not None:
                here = whole[rows.start : rows.stop]
            else:
                here = read_tensor(codes, first * sizes.row_bytes, len(rows) * sizes.row_bytes)
            values = native.decode(self.matrix(rows, here))
            yield Piece(slice(rows.start, rows.stop), slice(0, sizes.cols), values)


def stored_parts(
    scheme: Scheme, module: Module, matrix: ExpertMatrix, read: dict[str, U8] | None = None
) -> StoredParts:
    """Parts of a module that passed level structure; `read`: its parts but for the codes, if they
    were read already."""
    half = weight_dtype(matrix) == "F16"
    sizes = scheme.sizes(matrix.rows, matrix.cols, half)
    if read is None:
        read = {part: read_tensor(module.parts[part]) for part in scheme.layout.parts[1:]}
    scales = np.empty((0, 0), np.uint8)
    if scheme.encodes:
        scales = scheme.layout.scales(read, sizes)
    layout = scheme.layout
    factor, zeros = layout.factor(read), layout.zeros(read, sizes)
    return StoredParts(scheme, module, sizes, half, scales, factor, zeros)
