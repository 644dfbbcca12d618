"""The buffers of a worker.

A few MiB of source at a time go through them, so memory does not depend on the size of a tensor, a
layer or the model.
"""

from __future__ import annotations

from msgspec import Struct

from ktconv import native
from ktconv.source.reading.reader import BOUNCE_BYTES
from ktconv.system.arrays import U8
from ktconv.system.blocks import new_block

_LINE = 64  # bytes; each buffer begins a cache line
COPY_BYTES = 4 << 20  # twice in the buffer: as read, and as read back


class BufferSizes(Struct, frozen=True):
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
        sizes = (self.source_with_copies, BOUNCE_BYTES, self.packed, self.packed, scratch)
        return sum(map(whole_lines, sizes))


class Buffers:
    """The memory of one worker: new pages, so that they come from the NUMA node where it runs."""

    def __init__(self, sizes: BufferSizes) -> None:
        self._memory, self._used = new_block(sizes.nbytes), 0
        self.source = self._take(sizes.source_with_copies)
        self.bounce = self._take(BOUNCE_BYTES)
        self.packed = self._take(sizes.packed)
        self.readback = self._take(sizes.packed)
        self.scratch = self._take(native.scratch_size(sizes.scratch_cols))

    def _take(self, size: int) -> U8:
        start = self._used
        self._used += whole_lines(size)
        return self._memory[start : start + size]


def whole_lines(size: int) -> int:
    """Bytes of a place that begins and ends with a cache line."""
    return -(-size // _LINE) * _LINE
