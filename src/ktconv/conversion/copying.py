"""Copying tensors unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconv.checkpoint import TensorRef
from ktconv.errors import VerificationError
from ktconv.reading.buffers import COPY_BYTES, Buffers
from ktconv.reading.reader import SourceReader, Span
from ktconv.writer.staging import Staging


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

    def run(
        self, staging: Staging, buffers: Buffers, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        digest = hashlib.sha256()
        with self.reader.open(self.tensor.file) as fd:
            for offset in range(0, self.tensor.nbytes, COPY_BYTES):
                piece = buffers.source[: min(COPY_BYTES, self.tensor.nbytes - offset)]
                self.reader.read(fd, self.tensor, piece.data, offset)
                digest.update(piece.data)
                staging.write(self.name, piece.data, offset)
                if self.verify:
                    self._read_back(piece, staging, buffers, offset)
                advance(len(piece))
        return {self.name: {"sha256": digest.hexdigest()}}

    def _read_back(
        self, piece: npt.NDArray[np.uint8], staging: Staging, buffers: Buffers, offset: int
    ) -> None:
        written = buffers.source[COPY_BYTES : COPY_BYTES + len(piece)]
        staging.read(self.name, written.data, offset)
        if not np.array_equal(written, piece):
            raise changed_on_disk(self.name)


def changed_on_disk(name: str) -> VerificationError:
    """The error for bytes that are not those that were written."""
    return VerificationError(
        f"{name} was read back with other bytes than were written",
        "suspect the disk of this machine; run the same command again",
    )
