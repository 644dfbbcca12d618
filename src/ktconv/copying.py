"""Copying tensors unchanged, and the memory that a worker of any conversion has.

Work streams: a few MiB of source at a time go through the buffers of a worker, so memory
does not depend on the size of tensor, layer or model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconv import native
from ktconv.checkpoint import TensorRef
from ktconv.errors import VerificationError
from ktconv.pipeline import Span
from ktconv.source import BOUNCE_BYTES, SourceReader
from ktconv.writer.staging import Staging

COPY_BYTES = 4 << 20  # twice in the buffer: as read, and as read back


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Bytes that a worker needs beside those for copying."""

    source: int = 0
    packed: int = 0
    scratch_cols: int = 1

    @property
    def source_with_copies(self) -> int:
        return max(self.source, 2 * COPY_BYTES)

    @property
    def nbytes(self) -> int:
        """Total for one worker: source, bounce, packed, what is read back, scratch."""
        scratch = native.scratch_size(self.scratch_cols)
        return self.source_with_copies + BOUNCE_BYTES + 2 * self.packed + scratch


class Buffers:
    """The memory of one worker."""

    def __init__(self, sizes: BufferSizes) -> None:
        self.source = np.empty(sizes.source_with_copies, np.uint8)
        self.bounce = np.empty(BOUNCE_BYTES, np.uint8)
        self.packed = np.empty(sizes.packed, np.uint8)
        self.readback = np.empty(sizes.packed, np.uint8)
        self.scratch = native.new_scratch(sizes.scratch_cols)


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
