"""Steps that the tasks of all conversions share: writing, reading back, copying unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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

    @property
    def matrix(self) -> ExpertMatrix:
        return self.layer.experts[self.expert][self.proj]

    @property
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
            found = buffers.source[COPY_BYTES:][: len(piece)] if buffers else np.empty_like(piece)
            staging.read(name, found.data, offset)
            if found.tobytes() != piece.tobytes():
                raise VerificationError(
                    f"{name} read back differs from what was written",
                    "check this machine's disk, then run the same command again",
                )
        offset += len(piece)
    return digest.record()


def four_digits(value: float) -> float:
    """Rounded so that it is the same on every instruction set."""
    return float(f"{value:.4g}")
