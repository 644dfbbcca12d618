"""Files that are made while they are read: weights of a source with what adapters add to them.

A made file has the sums W + s B A of the matrices of one file of the source, one behind the other.
They are computed for the rows that are asked for, so that nobody waits for a model that is merged
as a whole, or needs the memory for it.

The same bytes are made on every machine, whatever its instructions and libraries: entries of A and
B are rounded to so few bits that sums of their products are exact in float64, in any order. These
bits are 21 at least, counted from the largest number of a column of A or a row of B; bf16 has 8.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import CheckpointError
from ktconv.formats.decode import f32_to_bf16
from ktconv.source.reading.encoded_sums import EncodedSums
from ktconv.source.reading.made import Contents, MadeFiles
from ktconv.source.reading.matrices import MatrixReader, Scales, buffer_bytes, spans_of
from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader
from ktconv.source.types import Checkpoint, ExpertMatrix, TensorRef
from ktconv.system.arrays import F32, U8
from ktconv.system.opened import advise
from ktconv.system.stores import Span

F64 = NDArray[np.float64]

_ROWS = 128  # pieces begin with whole row blocks of every encoding
_PIECE_BYTES = 8 << 20  # of float64 sums
_CACHED = 32768  # numbers of rows that are added at once
_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


class Part(Protocol):
    """The part of an adapter that is added to a matrix."""

    def load(self) -> Any:
        """The matrices, as `ktconv.source.adapter.files.LowRank`."""


class _Made(Struct, frozen=True):
    """A matrix of a made file."""

    name: str
    file: Path
    dtype: str
    matrix: ExpertMatrix  # in the source
    parts: Sequence[Part]
    encoded: EncodedSums | None = None
    scales: bool = False  # the tensor has the scales of these


class MergedFiles(MadeFiles[_Made]):
    """The made files of a checkpoint: `add` puts matrices into them."""

    def __init__(self, checkpoint: Checkpoint, adapters: Sequence[str]) -> None:
        super().__init__(" and ".join(adapters))
        self._reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._last = threading.local()  # the matrix that a thread reads
        self._rows = 0

    def add(
        self,
        tensor: TensorRef,
        matrix: ExpertMatrix,
        parts: Sequence[Part],
        dtype: str,
        shape: tuple[int, ...],
        encoded: EncodedSums | None = None,
    ) -> TensorRef:
        """A tensor of `shape` with the sums of `matrix`, which is in `tensor`, in its own file;
        with `encoded` its codes, or, for the tensor of its scales, those."""
        path, own = self.place(tensor.file)
        scales = encoded is not None and tensor.name == encoded.scale.name
        nbytes = tensor.nbytes if scales else matrix.rows * matrix.cols * _SIZES[dtype]
        found = TensorRef(tensor.name, path, dtype, shape, own.nbytes, nbytes)
        self._rows = max(self._rows, matrix.cols)
        own.add(_Made(tensor.name, path, dtype, matrix, parts, encoded, scales), nbytes)
        return found

    @property
    def memory(self) -> int:  # type: ignore[override]
        """Bytes that a thread needs: a piece of the source, its values, and sums in float64."""
        return 4 * max(_PIECE_BYTES, 8 * _ROWS * self._rows) + BOUNCE_BYTES

    def advise(self, spans: Sequence[Span]) -> None:
        wanted = (self._files[one.file].within(one.offset, one.nbytes) for one in spans)
        advise([one for found in wanted for made, _, _ in found for one in spans_of(made.matrix)])

    def read(self, own: Contents[_Made], target: memoryview, offset: int) -> None:
        data, done = np.frombuffer(target, np.uint8), 0
        for made, start, count in own.within(offset, len(data)):
            self._fill(made, data[done : done + count], start)
            done += count

    def _fill(self, made: _Made, target: U8, start: int) -> None:
        """Bytes of a matrix from `start` on."""
        if made.scales:
            target[:] = self._scales(made)[0][start : start + len(target)]
            return
        row_bytes = made.matrix.cols * _SIZES[made.dtype]
        step = max(1, _PIECE_BYTES // (8 * made.matrix.cols) // _ROWS) * _ROWS
        first = start // row_bytes // _ROWS * _ROWS
        stop = -(-(start + len(target)) // row_bytes)
        for row in range(first, stop, step):
            rows = range(row, min(row + step, -(-stop // _ROWS) * _ROWS, made.matrix.rows))
            sums = self._sums(made, rows)
            if made.encoded is None:
                stored = _stored(made, sums).reshape(-1).view(np.uint8)
            else:
                scales = self._scales(made)[1]
                stored = made.encoded.codes(rows, _finite(made, sums), scales).reshape(-1)
            low = max(start, rows.start * row_bytes)
            high = min(start + len(target), rows.stop * row_bytes)
            piece = stored[low - rows.start * row_bytes : high - rows.start * row_bytes]
            target[low - start : high - start] = piece

    def _scales(self, made: _Made) -> tuple[U8, F32]:
        """Scales of a matrix with FP8 codes, as `EncodedSums.scales` returns them."""
        step = max(1, _PIECE_BYTES // (8 * made.matrix.cols) // _ROWS) * _ROWS

        def pieces() -> Iterator[tuple[range, F32]]:
            for row in range(0, made.matrix.rows, step):
                rows = range(row, min(row + step, made.matrix.rows))
                yield rows, _finite(made, self._sums(made, rows))

        assert made.encoded is not None
        return made.encoded.scales(pieces)

    def _sums(self, made: _Made, rows: range) -> F32:
        """Rows of W + s B A, rounded once to float32.

        A few rows at a time, whose sums stay in the cache: whole pieces wait for memory, and make
        BLAS start threads."""
        loaded = self._loaded(made)
        sums = loaded.values(rows)
        step = max(1, _CACHED // sums.shape[1])
        with np.errstate(over="ignore"):
            for start in range(0, len(sums), step):
                part = sums[start : start + step]
                part[...] = loaded.added(rows.start + start, len(part)) + part
        return sums

    def _loaded(self, made: _Made) -> _Loaded:
        """A matrix with what is read of it only once; the last one of this thread stays."""
        last: _Loaded | None = getattr(self._last, "loaded", None)
        if last is None or last.made is not made:
            self._last.loaded = last = _Loaded(made, self._reader)
        return last


class _Loaded:
    """A matrix of the source and what is added to it, as a thread has them."""

    def __init__(self, made: _Made, reader: SourceReader) -> None:
        self.made = made
        self._source = MatrixReader(reader, made.matrix)
        self._scales: Scales | None = self._source.load_scales()
        self._buffer = np.empty(0, np.uint8)
        self.products = [exact(one.a, one.b, one.scale) for one in (p.load() for p in made.parts)]

    def added(self, first: int, count: int) -> F64:
        """Rows of all s B A together."""
        found = np.zeros((count, self.made.matrix.cols))
        for a, b, scale in self.products:
            product = b[first : first + count] @ a
            product *= scale
            found += product
        return found

    def values(self, rows: range) -> F32:
        """Rows of the source."""
        source, matrix = self._source, self.made.matrix
        size = buffer_bytes(matrix, len(rows))
        if self._buffer.nbytes < size:
            self._buffer = np.empty(size, np.uint8)
        with source.open() as fd:
            source.read(fd, rows, self._buffer, np.empty(BOUNCE_BYTES, np.uint8))
        view = source.view(rows, self._scales, self._buffer, 0, matrix.cols)
        return source.finite(native.decode(view), rows.start)


def exact(a: F32, b: F32, scale: float) -> tuple[F64, F64, float]:
    """a [rank, inputs] and b [outputs, rank] with entries whose products have exact sums."""
    bits = (53 - math.ceil(math.log2(max(2, a.shape[0])))) // 2
    return _rounded(a, bits, axis=0), _rounded(b, bits, axis=1), scale


def _rounded(values: F32, bits: int, axis: int) -> F64:
    """Multiples of 2^-bits times the power of two above the largest number along an axis."""
    wide = values.astype(np.float64)
    _, exponent = np.frexp(np.abs(wide).max(axis=axis, keepdims=True))
    unit = np.ldexp(1.0, exponent - bits)
    found: F64 = np.rint(wide / unit) * unit
    return found


def _stored(made: _Made, values: F32) -> Any:
    """Values as a tensor has them. CheckpointError for one that its dtype does not have."""
    if made.dtype == "BF16":
        stored: Any = f32_to_bf16(values)
        finite = (stored & 0x7F80 != 0x7F80).all()
    else:
        with np.errstate(over="ignore"):
            stored = values.astype("<f2" if made.dtype == "F16" else "<f4", copy=False)
        finite = np.isfinite(stored).all()
    if not finite:
        raise _beyond(made)
    return stored


def _finite(made: _Made, sums: F32) -> F32:
    if not np.isfinite(sums).all():
        raise _beyond(made)
    return sums


def _beyond(made: _Made) -> CheckpointError:
    return CheckpointError(
        f"{made.name} in {made.file} is beyond {made.dtype}",
        "give a smaller weight with the adapter, or check that it is of this model",
    )
