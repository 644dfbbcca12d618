"""The check of a copied tensor of a pruned output: the bytes of the source's experts that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from ktconv.source import TensorRef
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.reader import Span
from ktconv.system.arrays import U8
from ktconv.verify.reading import COPY_BYTES, Context, TensorStream
from ktconv.verify.runner import Advance
from ktconv.verify.second_reader.pruned import Origin
from ktconv.verify.totals import ItemResult


class KeptCheck(Struct, frozen=True):
    """The checksum of a tensor, and its equality with what stays of the source's."""

    context: Context
    unit: str
    tensor: TensorRef  # in the output
    origin: Origin | None  # None: the source has none, which is a failure

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def spans(self) -> Sequence[Span]:
        if self.origin is None:
            return []
        one = self.origin.tensor
        return [Span(one.file, one.offset + start, size) for start, size in self._runs()]

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        stream, wrong, done = TensorStream(self.context, self.tensor), -1, 0
        for start, size in self._runs() if self.origin is not None else ():
            for offset in range(0, size, COPY_BYTES):
                count = min(COPY_BYTES, size - offset)
                piece = stream.read(buffers.source[:count])
                if wrong < 0 and not self._equal(piece, start + offset, buffers):
                    wrong = done
                done += count
                advance(count)
        stream.read_rest(buffers.source)
        if self.origin is None:
            self.context.fail_copy(self.tensor, "is no tensor of the source's experts that stay")
        elif wrong >= 0:
            self.context.fail_copy(self.tensor, f"differs from the source{self._place(wrong)}")
        return ItemResult(
            self.nbytes, int(stream.check() is not None), int(self.origin is not None)
        )

    def _equal(self, piece: U8, start: int, buffers: Buffers) -> bool:
        assert self.origin is not None
        other = buffers.source[COPY_BYTES : COPY_BYTES + len(piece)]
        with self.context.reader.open(self.origin.tensor.file) as fd:
            self.context.reader.read(fd, self.origin.tensor, other.data, start)
        return bool(np.array_equal(piece, other))

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Offsets in the source's tensor and sizes, in the order of the output."""
        assert self.origin is not None
        one, axis = self.origin.tensor, self.origin.axis
        if axis is None:
            yield 0, one.nbytes
            return
        outer = int(np.prod(one.shape[:axis], dtype=np.int64))
        inner = one.nbytes // (outer * self.origin.parts)
        for row in range(outer):
            for index in self.origin.kept:
                yield (row * self.origin.parts + index) * inner, inner

    def _place(self, done: int) -> str:
        """The first index of the output that differs, and the source's that it should be."""
        assert self.origin is not None
        if self.origin.axis is None:
            return ""
        inner = self.tensor.nbytes // len(self.origin.kept)
        new = done // inner if self.origin.axis == 0 else 0
        return f" at its index {new}, which should be the source's {self.origin.kept[new]}"
