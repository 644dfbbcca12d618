"""Steps that the tasks of all conversions share: writing, reading back, copying unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.conversion.plan import LayerUnit, Unit
from ktconv.errors import KtconvError, VerificationError
from ktconv.source import ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.source.reading.buffers import COPY_BYTES, Buffers, whole_lines
from ktconv.source.reading.matrices import buffer_bytes, source_bytes, spans_of
from ktconv.source.reading.reader import SourceReader, Span
from ktconv.system.arrays import U8
from ktconv.system.checksums import Checksum
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging


def spans_of_unit(unit: Unit) -> Iterator[Span]:
    """Spans of the source that converting a unit reads."""
    for tensor, _ in unit.copies:
        yield Span(tensor.file, tensor.offset, tensor.nbytes)
    if isinstance(unit, LayerUnit):
        for expert in unit.experts:
            for matrix in unit.layer.experts[expert].values():
                yield from spans_of(matrix)


Advance = Callable[[int], None]


class CopyTask(Struct, frozen=True):
    """One non-expert tensor, copied unchanged."""

    reader: SourceReader
    tensor: TensorRef
    name: str
    verify: bool  # read back what was written

    @property
    def source_bytes(self) -> int:
        return self.tensor.nbytes

    def spans(self) -> Sequence[Span]:
        return [Span(self.tensor.file, self.tensor.offset, self.tensor.nbytes)]

    def checksum(self) -> Checksum:
        """A new one, of the algorithm that the manifest gets."""
        return Checksum()

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        with self.reader.open(self.tensor.file) as fd:

            def read(piece: U8, offset: int) -> None:
                self.reader.read(fd, self.tensor, piece.data, offset)

            pieces = pieces_of(self.tensor.nbytes, read, buffers, advance)
            found = write_tensor(self.name, pieces, staging, self.verify, buffers, self.checksum())
        return {self.name: found}


class ExpertTask(Struct, frozen=True, dict=True):
    """Base of the tasks that convert one projection of one expert."""

    reader: SourceReader
    layer: MoELayer
    expert: int
    proj: Projection
    verify: bool  # read back what was written

    @cached_property
    def matrix(self) -> ExpertMatrix:
        return self.layer.experts[self.expert][self.proj]

    @cached_property
    def source_bytes(self) -> int:
        return source_bytes(self.matrix)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of a place for the whole matrix as it is read."""
        return whole_lines(buffer_bytes(self.matrix, self.matrix.rows))

    def spans(self) -> Sequence[Span]:
        return spans_of(self.matrix)


def pieces_of(
    nbytes: int, read: Callable[[U8, int], None], buffers: Buffers, advance: Advance
) -> Iterator[U8]:
    """The bytes of a tensor, a few MiB at a time; `read` fills a piece from its offset on."""
    for offset in range(0, nbytes, COPY_BYTES):
        piece = buffers.source[: min(COPY_BYTES, nbytes - offset)]
        read(piece, offset)
        yield piece
        advance(len(piece))


class Piece(NamedTuple):
    """Bytes of a tensor from `offset` on."""

    name: str
    size: int
    offset: int


@contextmanager
def written(staging: Staging, pieces: Sequence[Piece], target: U8) -> Iterator[U8]:
    """The bytes of pieces that follow one another in a file as the system has them, as many as
    `target` takes, inside the block: mapped, or read into `target`."""
    name, _, offset = pieces[0]
    mapped = staging.mapped(name, target.nbytes, offset)
    if mapped is None:
        _read_back(staging, pieces, target)
        yield target
        return
    try:
        yield mapped.data
    except VerificationError:
        _read_back(staging, pieces, target)  # raises where the file has become shorter
        raise
    finally:  # also where something failed: that can be the doing of what was lost
        if mapped.lost:
            _read_back(staging, pieces, target)
            raise VerificationError(
                f"{name} could not be read back",
                "check this machine's disk, then run the same command again",
            )


def write_piece(
    staging: Staging, name: str, data: U8, offset: int, target: U8 | None
) -> AbstractContextManager[U8]:
    """Write bytes of a tensor; inside the block, those to compare: with `target` as `written` has
    them, else the same."""
    staging.write(name, data.data, offset)
    if target is None:
        return nullcontext(data)
    return written(staging, [Piece(name, target.nbytes, offset)], target)


def _read_back(staging: Staging, pieces: Sequence[Piece], target: U8) -> None:
    """Read pieces into `target`: all at once, and where that fails one by one, so that the error
    names the tensor that cannot be read."""
    try:
        staging.read(pieces[0].name, target.data, pieces[0].offset)
    except KtconvError:
        start = 0
        for name, size, offset in pieces:
            staging.read(name, target[start : start + size].data, offset)
            start += size
        raise


def refuse_other(name: str, found: U8, wanted: U8) -> int:
    """`native.byte_sum` of `found`. VerificationError unless the bytes that were read back are
    those that were written."""
    total = native.same_bytes(found, wanted)
    if total is None:
        raise VerificationError(
            f"{name} read back differs from what was written",
            "check this machine's disk, then run the same command again",
        )
    return total


class Stretch(Struct):
    """Bytes of a tensor from `offset` on, whose checksum is in `digest`. `total`: their sum when
    they were compared with the source."""

    name: str
    digest: Checksum
    data: U8
    offset: int
    total: int


_WORD = 8  # bytes of what sums are of: those of stretches that end within one cannot be added


def write_stretches(
    stretches: Sequence[Stretch], staging: Staging, target: U8, verify: bool
) -> None:
    """Write stretches; those that follow one another in memory and in a file at once: each call of
    the system takes longer than a small matrix. With `verify` they are read back, into `target`
    unless they can be mapped. VerificationError where they differ, or are not what was compared."""
    for run in _runs(stretches, staging):
        first = run[0]
        size = sum(one.data.nbytes for one in run)
        data = first.data
        if len(run) > 1:
            data = native.array_at(native.address_of(data), np.uint8, (size,))
        staging.write(first.name, data.data, first.offset)
        if not verify:
            for one in run:
                one.digest.update(one.data)
            continue
        pieces = [Piece(one.name, one.data.nbytes, one.offset) for one in run]
        with written(staging, pieces, target[:size]) as found:
            start = 0
            for one in run:
                stop = start + one.data.nbytes
                _take_back(one, found[start:stop])
                start = stop


def _take_back(one: Stretch, found: U8) -> None:
    """Checksum of a stretch as it was read back. VerificationError unless it is what was compared:
    asked next, while a cache has it."""
    one.digest.update(found)
    if refuse_other(one.name, found, one.data) != one.total:
        raise VerificationError(
            f"{one.name} changed in memory between its comparison with the source and writing",
            "check this machine's memory, then run the same command again",
        )


def _runs(stretches: Sequence[Stretch], staging: Staging) -> Iterator[list[Stretch]]:
    run: list[Stretch] = []
    end: tuple[int, Path, int] | None = None
    for one in stretches:
        file, start = staging.place(one.name)
        address, start = native.address_of(one.data), start + one.offset
        if run and (address, file, start) != end:
            yield run
            run = []
        run.append(one)
        size = one.data.nbytes
        end = (address + size, file, start + size) if size % _WORD == 0 else None
    if run:
        yield run


def write_tensor(
    name: str,
    pieces: Iterable[U8],
    staging: Staging,
    verify: bool,
    buffers: Buffers | None = None,
    digest: Checksum | None = None,
) -> Record:
    """Write consecutive pieces of a tensor; its record for the manifest, with the checksum of
    `digest`.

    With `verify` each is read back, into the second half of `buffers.source` if `buffers` are
    given. Raises VerificationError where it differs.
    """
    digest, offset = digest or Checksum(), 0
    for piece in pieces:
        digest.update(piece.data)
        staging.write(name, piece.data, offset)
        if verify:
            target = buffers.source[COPY_BYTES:][: len(piece)] if buffers else np.empty_like(piece)
            with written(staging, [Piece(name, len(piece), offset)], target) as found:
                refuse_other(name, found, piece)
        offset += len(piece)
    return digest.record()


def four_digits(value: float) -> float:
    """Rounded so that it is the same on every instruction set."""
    return float(f"{value:.4g}")
