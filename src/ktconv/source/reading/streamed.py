"""Matrices whose values come a few rows at a time, so that no large one is in memory whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct

from ktconv.system.arrays import F32

PIECE_BYTES = 8 << 20  # of values: what a piece of a large matrix aims at
_ROWS_STEP = 128  # rows of a piece, but of the last: whole row blocks of every packed format


class Piece(Struct, frozen=True):
    """The values [rows, cols] of a part of a matrix."""

    rows: slice
    cols: slice
    values: F32


class Streamed(Struct, frozen=True):
    """A matrix [rows, cols]; `pieces()` covers it once, each time it is called. `bias` [rows] is
    added to products."""

    rows: int
    cols: int
    pieces: Callable[[], Iterator[Piece]]
    bias: F32 | None = None

    def product(self, x: F32) -> F32:
        """x [M, cols] times the transposed matrix, and the bias: [M, rows]."""
        y = np.zeros((len(x), self.rows), np.float32)
        for piece in self.pieces():
            y[:, piece.rows] += x[:, piece.cols] @ piece.values.T
        return y if self.bias is None else y + self.bias

    def values(self) -> F32:
        """The whole matrix."""
        found = np.empty((self.rows, self.cols), np.float32)
        for piece in self.pieces():
            found[piece.rows, piece.cols] = piece.values
        return found


# gate [I, H] (None: experts without one), up [I, H], down [H, I]
Streams = tuple[Streamed | None, Streamed, Streamed]


def whole(matrix: F32, bias: F32 | None = None) -> Streamed:
    """A matrix that is in memory already, as one piece."""
    rows, cols = matrix.shape
    piece = Piece(slice(0, rows), slice(0, cols), matrix)
    return Streamed(rows, cols, lambda: iter((piece,)), bias)


def piece_rows(cols: int) -> int:
    """Rows of a piece of a matrix with `cols` columns."""
    return max(1, PIECE_BYTES // (4 * cols * _ROWS_STEP)) * _ROWS_STEP
