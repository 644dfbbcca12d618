"""Steps that the tasks of all conversions share: writing, reading back, copying unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ktconv import native
from ktconv.conversion.plan import LayerUnit, Unit
from ktconv.errors import VerificationError
from ktconv.source import ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.source.reading.buffers import COPY_BYTES, Buffers
from ktconv.source.reading.matrices import source_bytes, spans_of
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
CACHED_BYTES = 256 << 10  # that a second cache still has when they are read once more


@dataclass(frozen=True, slots=True)
class CopyTask:
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


@dataclass(frozen=True)
class ExpertTask:
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


@contextmanager
def written(staging: Staging, name: str, target: U8, offset: int) -> Iterator[U8]:
    """Bytes of a tensor from `offset` on as the system has them, as many as `target` takes, inside
    the block: mapped, or read into `target`."""
    mapped = staging.mapped(name, target.nbytes, offset)
    if mapped is None:
        staging.read(name, target.data, offset)
        yield target
        return
    try:
        yield mapped.data
    finally:  # also where something failed: that can be the doing of what was lost
        if mapped.lost:
            staging.read(name, target.data, offset)
            raise VerificationError(
                f"{name} could not be read back",
                "check this machine's disk, then run the same command again",
            )


def refuse_other(name: str, found: U8, wanted: U8) -> int:
    """`native.byte_sum` of `found`. VerificationError unless the bytes that were read back are
    those that were written."""
    total = 0
    for start in range(0, len(found), CACHED_BYTES):
        pieces = [data[start : start + CACHED_BYTES] for data in (found, wanted)]
        wide = np.uint64 if pieces[0].nbytes % 8 == 0 else np.uint8  # fewer comparisons
        if not np.array_equal(*(piece.view(wide) for piece in pieces)):
            raise VerificationError(
                f"{name} read back differs from what was written",
                "check this machine's disk, then run the same command again",
            )
        total += native.byte_sum(pieces[0])
    return total % 2**64


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
            with written(staging, name, target, offset) as found:
                refuse_other(name, found, piece)
        offset += len(piece)
    return digest.record()


def four_digits(value: float) -> float:
    """Rounded so that it is the same on every instruction set."""
    return float(f"{value:.4g}")
