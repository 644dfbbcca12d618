"""Division of an expert's matrices into NUMA parts (SPEC 1), as index ranges."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from .names import Matrix


class Slice(Struct, frozen=True):
    """Rows and columns of a forward matrix that one part owns; ends exclusive."""

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_stop - self.row_start, self.col_stop - self.col_start

    @property
    def index(self) -> tuple[slice, slice]:
        """Index for `matrix[part.index]`."""
        return slice(self.row_start, self.row_stop), slice(self.col_start, self.col_stop)


def is_down(proj: Matrix) -> bool:
    """Whether the forward matrix is [hidden, intermediate] and cut by columns."""
    return proj in ("down", "down_bwd")


def is_backward(proj: Matrix) -> bool:
    """Whether the packed matrix is the transpose of the forward slice."""
    return proj.endswith("_bwd")


def cut_by_rows(proj: Matrix) -> bool:
    """Whether the parts of a packed matrix are rows of the whole, not columns."""
    return is_down(proj) == is_backward(proj)


def matrix_shape(proj: Matrix, hidden: int, intermediate: int) -> tuple[int, int]:
    """Shape [out, in] of the whole forward matrix behind `proj`."""
    return (hidden, intermediate) if is_down(proj) else (intermediate, hidden)


@lru_cache(1000)  # asked for every matrix of a model
def split(proj: Matrix, hidden: int, intermediate: int, part: int, parts: int) -> Slice:
    """Slice that `part` of `parts` owns: rows of gate and up, columns of down.

    A backward matrix is the transpose of this same slice.
    """
    if not 0 <= part < parts or intermediate % parts:
        raise ValueError(f"part {part} of {parts} of an intermediate size of {intermediate}")
    width = intermediate // parts
    start, stop = part * width, (part + 1) * width
    if is_down(proj):
        return Slice(0, hidden, start, stop)
    return Slice(start, stop, 0, hidden)


def packed_shape(proj: Matrix, hidden: int, intermediate: int, parts: int) -> tuple[int, int]:
    """Rows N and columns K of one part's packed matrix, backward transposed."""
    rows, cols = split(proj, hidden, intermediate, 0, parts).shape
    return (cols, rows) if is_backward(proj) else (rows, cols)
