"""The buffers of a worker.

A few MiB of source at a time go through them, so memory does not depend on the size of a tensor, a
layer or the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktconv import native
from ktconv.source.reading.reader import BOUNCE_BYTES

COPY_BYTES = 4 << 20  # twice in the buffer: as read, and as read back


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Bytes that a worker needs in addition to those for copying."""

    source: int = 0
    packed: int = 0
    scratch_cols: int = 1

    def with_those_of(self, other: BufferSizes) -> BufferSizes:
        """Enough for both."""
        return BufferSizes(
            max(self.source, other.source),
            max(self.packed, other.packed),
            max(self.scratch_cols, other.scratch_cols),
        )

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
