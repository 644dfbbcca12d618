"""Level 1, other tensors: byte for byte what the source has."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktconv.checkpoint import TensorRef
from ktconv.packed.weights import Place
from ktconv.reading.buffers import Buffers
from ktconv.system.regular_files import opened_regular
from ktconv.verify.reading import Context, compare_sum, read_into
from ktconv.verify.runner import Advance
from ktconv.verify.totals import ItemResult

U8 = NDArray[np.uint8]

COPY_BYTES = 4 << 20
OTHER = "other"  # the unit of tensors of no expert


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """One non-expert tensor: checksum, and byte for byte what the source has."""

    context: Context
    unit: str
    tensor: TensorRef  # in the output
    origin: TensorRef | None  # in the source

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        digest, equal = hashlib.sha256(), True
        with opened_regular(self.tensor.file) as fd:
            for offset in range(0, self.tensor.nbytes, COPY_BYTES):
                piece = buffers.source[: min(COPY_BYTES, self.tensor.nbytes - offset)]
                read_into(fd, self.tensor.file, piece, self.tensor.offset + offset)
                digest.update(piece.data)
                equal = equal and self._equal(piece, offset, buffers)
                advance(len(piece))
        if not equal:
            self.context.findings.fail(
                "structure",
                "copied tensor",
                f"{self.tensor.name} in {self.tensor.file.name} is not what the source has.",
                file=self.tensor.file.name,
                tensor=self.tensor.name,
            )
        place = Place(self.tensor.file, self.tensor.offset, self.tensor.nbytes)
        checked = compare_sum(self.context, self.tensor.name, place, digest.hexdigest())
        return ItemResult(self.tensor.nbytes, checked.compared, int(self.origin is not None))

    def _equal(self, piece: U8, offset: int, buffers: Buffers) -> bool:
        if self.origin is None or self.context.reader is None:
            return True
        if self.origin.nbytes != self.tensor.nbytes:
            return False
        other = buffers.source[COPY_BYTES : COPY_BYTES + len(piece)]
        with self.context.reader.open(self.origin.file) as fd:
            self.context.reader.read(fd, self.origin, other.data, offset)
        return bool(np.array_equal(piece, other))
