"""Level structure: non-expert tensors, byte for byte what the source has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktconv.checkpoint import TensorRef
from ktconv.reading.buffers import Buffers
from ktconv.system.arrays import U8
from ktconv.verify.reading import Context, TensorStream
from ktconv.verify.runner import Advance
from ktconv.verify.totals import ItemResult

COPY_BYTES = 4 << 20
OTHER = "other"  # the unit of non-expert tensors


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """The checksum of one tensor and its equality with the source."""

    context: Context
    unit: str
    tensor: TensorRef  # in the output
    origin: TensorRef | None  # in the source

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        stream, equal = TensorStream(self.context, self.tensor), True
        for offset in range(0, self.nbytes, COPY_BYTES):
            piece = stream.read(buffers.source[: min(COPY_BYTES, self.nbytes - offset)])
            equal = equal and self._equal(piece, offset, buffers)
            advance(len(piece))
        if not equal:
            self.context.fail_copy(self.tensor, "differs from the source")
        return ItemResult(self.nbytes, stream.check() is not None, int(self.origin is not None))

    def _equal(self, piece: U8, offset: int, buffers: Buffers) -> bool:
        if self.origin is None or self.context.reader is None:
            return True
        if self.origin.nbytes != self.tensor.nbytes:
            return False
        other = buffers.source[COPY_BYTES : COPY_BYTES + len(piece)]
        with self.context.reader.open(self.origin.file) as fd:
            self.context.reader.read(fd, self.origin, other.data, offset)
        return bool(np.array_equal(piece, other))
