"""What the tasks of all conversions share: writing, reading back, copying unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconv.checkpoint import ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.conversion.plan import matrix_source_bytes
from ktconv.errors import VerificationError
from ktconv.reading.buffers import COPY_BYTES, Buffers
from ktconv.reading.matrices import span_of
from ktconv.reading.reader import SourceReader, Span
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging

U8 = npt.NDArray[np.uint8]
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

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        with self.reader.open(self.tensor.file) as fd:

            def read(piece: U8, offset: int) -> None:
                self.reader.read(fd, self.tensor, piece.data, offset)

            size = self.tensor.nbytes
            return {
                self.name: copy_through(
                    self.name, size, read, staging, buffers, self.verify, advance
                )
            }


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
        return matrix_source_bytes(self.layer, self.expert, self.proj)

    def spans(self) -> Sequence[Span]:
        return [span_of(self.matrix)]


def copy_through(
    name: str,
    nbytes: int,
    read: Callable[[U8, int], None],
    staging: Staging,
    buffers: Buffers,
    verify: bool,
    advance: Advance,
) -> Record:
    """Copy a tensor a few MiB at a time; `read` fills a piece from its offset on."""
    digest = hashlib.sha256()
    for offset in range(0, nbytes, COPY_BYTES):
        piece = buffers.source[: min(COPY_BYTES, nbytes - offset)]
        read(piece, offset)
        digest.update(piece.data)
        staging.write(name, piece.data, offset)
        if verify:
            check_written(name, piece, staging, offset, buffers.source[COPY_BYTES:])
        advance(len(piece))
    return {"sha256": digest.hexdigest()}


def write_whole(name: str, data: U8, staging: Staging, verify: bool) -> Record:
    """Write a tensor at once."""
    staging.write(name, data.data, 0)
    if verify:
        check_written(name, data, staging)
    return {"sha256": hashlib.sha256(data.data).hexdigest()}


def check_written(
    name: str, data: U8, staging: Staging, offset: int = 0, buffer: U8 | None = None
) -> None:
    """Read back what was written, into `buffer` if there is one, and compare."""
    found = np.empty_like(data) if buffer is None else buffer[: len(data)]
    staging.read(name, found.data, offset)
    if not np.array_equal(found, data):
        raise VerificationError(
            f"{name} read back differs from what was written",
            "check this machine's disk, then run the same command again",
        )


def four_digits(value: float) -> float:
    """Enough to compare, and the same on every ISA."""
    return float(f"{value:.4g}")
