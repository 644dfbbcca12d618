"""Reads and compares one matrix or tensor of both conversions at a time, in worker threads."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ktconv.formats import Matrix
from ktconv.source import TensorRef
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.reader import Span
from ktconv.system.abstract_record import AbstractRecord
from ktconv.system.arrays import F32, U8, Bools
from ktconv.verify.compare.comparison import finite
from ktconv.verify.compare.sides import Piece, Side, Values
from ktconv.verify.reading import read_tensor
from ktconv.verify.runner import OTHER, Advance, unit_of

CHUNK_ELEMENTS = 1 << 17  # of a matrix, at a time in float64
_CHUNK_ARRAYS = 64  # bytes of memory per element of a chunk
CHUNK_BYTES = 8 << 20  # of a non-expert tensor, at a time


class DifferenceStats(Struct):
    """Differences of any number of elements."""

    squared_a: float = 0.0
    squared_b: float = 0.0
    product: float = 0.0
    squared_difference: float = 0.0
    max_steps: float = 0.0  # in the larger of both steps; NaN if a difference is not finite
    differing: int = 0
    rounded_steps: float = 0.0  # as max_steps, without values that one side cuts to its last level

    def add(self, other: DifferenceStats) -> None:
        self.squared_a += other.squared_a
        self.squared_b += other.squared_b
        self.product += other.product
        self.squared_difference += other.squared_difference
        self.max_steps = float(np.maximum(self.max_steps, other.max_steps))
        self.differing += other.differing
        self.rounded_steps = float(np.maximum(self.rounded_steps, other.rounded_steps))

    @property
    def relative(self) -> float | None:
        """RMS relative to A, or to B where A is zero everywhere. None: not finite."""
        whole = self.squared_a or self.squared_b
        return finite(math.sqrt(self.squared_difference / whole)) if whole else 0.0

    def as_dict(self) -> dict[str, Any]:
        """None: not finite."""
        whole = self.squared_a or self.squared_b
        length = math.sqrt(self.squared_a) * math.sqrt(self.squared_b)
        cosine = min(self.product / length, 1.0) if length else 1.0 - bool(whole)
        return {
            "relative_rms_difference": self.relative,
            "cosine": finite(cosine),
            "max_difference_steps": finite(self.max_steps),
            "differing_elements": self.differing,
        }


# Where only bytes could be compared.
_UNKNOWN = DifferenceStats(*(math.nan,) * 5, rounded_steps=math.nan)


class TaskResult(Struct, frozen=True):
    """The comparison of a matrix or a tensor."""

    task: Task
    same_bytes: bool
    equal: bool
    sums: DifferenceStats | None = None  # None: equal
    # The place and both values of the first element that differs, row by row of the whole matrix;
    # None: equal, or only bytes could be compared.
    first: dict[str, Any] | None = None
    digests: tuple[bytes, bytes] | None = None  # of the bytes of A and B, where they differ
    offset: int = 0  # of the first byte that differs, of a tensor


class _Pair(AbstractRecord, frozen=True):
    """Something of both sides, which are on this machine."""

    a: Any
    b: Any

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes + self.b.nbytes)

    def spans(self) -> Sequence[Span]:
        return []

    def run(self, _: Buffers, advance: Advance) -> TaskResult:
        found = self._compare()
        advance(self.nbytes)
        return found

    @abstractmethod
    def _compare(self) -> TaskResult: ...


class MatrixTask(_Pair, frozen=True):
    """All parts of one projection of one expert on both sides."""

    a: Side
    b: Side
    layer: int
    expert: int
    proj: Matrix

    @property
    def unit(self) -> str:
        return unit_of(self.layer)

    @property
    def elements(self) -> int:
        rows, cols = self.a.geometry.shape(self.proj)
        return rows * cols * self.a.geometry.parts

    @property
    def memory(self) -> int:
        """Bytes while it runs: both sides, codes in parts and joined, and rows in float64."""
        return self.nbytes + 4 * self.elements + _CHUNK_ARRAYS * CHUNK_ELEMENTS

    def _compare(self) -> TaskResult:
        a, b = self.a.load(), self.b.load()
        if a.keys() == b.keys() and all(np.array_equal(a[piece], b[piece]) for piece in a):
            return TaskResult(self, same_bytes=True, equal=True)
        if self.a.fault or self.b.fault:
            return TaskResult(self, False, False, _UNKNOWN, None, (_digest(a), _digest(b)))
        if not np.array_equal(_biases(a), _biases(b)):
            return TaskResult(self, False, False, _UNKNOWN, None, (_digest(a), _digest(b)))
        values = self.a.joined(a), self.b.joined(b)
        if values[0].same_as(values[1]):
            return TaskResult(self, same_bytes=False, equal=True)
        sums, first = _measure(*values)
        if first is None:
            return TaskResult(self, same_bytes=False, equal=True)
        return TaskResult(self, False, False, sums, first, (_digest(a), _digest(b)))


def _biases(data: Mapping[Piece, U8]) -> U8:
    """Biases of all parts, one behind the other."""
    pieces = [data[piece] for piece in sorted(data) if piece[1] == "bias"]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


def _digest(data: Mapping[Piece, U8]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in sorted(data):
        digest.update(f"{piece} {data[piece].nbytes}".encode())
        digest.update(data[piece].data)
    return digest.digest()


def _measure(a: Values, b: Values) -> tuple[DifferenceStats, dict[str, Any] | None]:
    """Compares some rows at a time, so that float64 copies stay small."""
    rows, cols = a.codes.shape
    height = max(1, CHUNK_ELEMENTS // cols)
    total, first = DifferenceStats(), None
    with np.errstate(all="ignore"):
        for start in range(0, rows, height):
            here = slice(start, start + height)
            left, right = a.values(here), b.values(here)
            unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
            if first is None and unequal.any():
                row, column = at = divmod(int(unequal.argmax()), cols)
                values = {"value_a": finite(left[at]), "value_b": finite(right[at])}
                first = {"row": start + row, "column": column, **values}
            step = np.maximum(a.steps(here), b.steps(here))
            total.add(sums_of(left, right, unequal, step, a.cut(here, right) | b.cut(here, left)))
    return total, first


def sums_of(left: F32, right: F32, unequal: Bools, step: F32, cut: Bools) -> DifferenceStats:
    """`cut`: values that one side can have cut to its last level."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    difference = np.zeros_like(a)
    np.subtract(a, b, out=difference, where=unequal)
    steps = np.divide(np.abs(difference), step, out=np.zeros_like(a), where=unequal)
    return DifferenceStats(
        _product(a, a),
        _product(b, b),
        _product(a, b),
        _product(difference, difference),
        float(steps.max(initial=0.0)),
        int(unequal.sum()),
        float(steps.max(initial=0.0, where=~cut)),
    )


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The sum of products in a fixed order; BLAS would divide it among threads."""
    return float(np.einsum("ij,ij->", a, b))


class TensorTask(_Pair, frozen=True):
    """One non-expert tensor of both sides, of the same type."""

    a: TensorRef
    b: TensorRef

    unit = OTHER
    memory = 2 * CHUNK_BYTES

    def _compare(self) -> TaskResult:
        for offset in range(0, self.a.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.a.nbytes - offset)
            a, b = (read_tensor(tensor, offset, size) for tensor in (self.a, self.b))
            if not np.array_equal(a, b):
                return TaskResult(self, False, False, offset=offset + int((a != b).argmax()))
        return TaskResult(self, same_bytes=True, equal=True)


Task = MatrixTask | TensorTask
