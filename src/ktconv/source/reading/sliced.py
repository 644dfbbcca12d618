"""Files that are made while they are read: tensors of a source without some of their rows.

A made file has the tensors of one file of the source that are cut, one behind the other. A tensor
counts as [outer, count, inner bytes]: of the middle axis the kept indices stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv.source.reading.made import Contents, MadeFiles
from ktconv.source.reading.reader import SourceReader
from ktconv.source.types import Checkpoint, TensorRef
from ktconv.system.opened import Opened, advise
from ktconv.system.stores import Span


class _Cut(Struct, frozen=True):
    """A tensor of a made file."""

    origin: TensorRef  # in the source
    outer: int
    count: int
    kept: tuple[int, ...]

    @property
    def inner(self) -> int:
        """Bytes of an index."""
        return self.origin.nbytes // (self.outer * self.count)

    def spans(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Offsets in the origin and sizes, one behind the other, of bytes from `start` on; of a
        tensor whose first axis is cut."""
        inner = self.inner
        first, last = start // inner, -(-(start + nbytes) // inner)
        done = 0
        for _, run in groupby(enumerate(self.kept[first:last]), lambda one: one[1] - one[0]):
            ids = [one for _, one in run]
            begin, end = ids[0] * inner, (ids[-1] + 1) * inner
            if not done:
                begin += start - first * inner
            size = min(end - begin, nbytes - done)
            yield begin, size
            done += size


class SlicedFiles(MadeFiles[_Cut]):
    """The made files of a checkpoint: `add` puts tensors into them."""

    memory = 0

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__("fewer experts")
        self._reader = SourceReader(checkpoint.files, checkpoint.sources)

    def add(
        self, tensor: TensorRef, axis: int, count: int, kept: Sequence[int], name: str = ""
    ) -> TensorRef:
        """A tensor with the kept ones of the `count` indices of an axis, whose size is a multiple
        of `count`."""
        (path, own), shape = self.place(tensor.file), list(tensor.shape)
        assert shape[axis] % count == 0, "whole indices"
        shape[axis] = shape[axis] // count * len(kept)
        outer = int(np.prod(tensor.shape[:axis], dtype=np.int64))
        nbytes = tensor.nbytes // count * len(kept)
        found = replace(
            tensor,
            name=name or tensor.name,
            file=path,
            shape=tuple(shape),
            offset=own.nbytes,
            nbytes=nbytes,
        )
        own.add(_Cut(tensor, outer, count, tuple(kept)), nbytes)
        return found

    def advise(self, spans: Sequence[Span]) -> None:
        advise([one for span in spans for one in self._origins(span)])

    def _origins(self, span: Span) -> Iterator[Span]:
        own = self._files[span.file]
        for cut, start, size in own.within(span.offset, span.nbytes):
            origin = cut.origin
            if cut.outer > 1:
                yield Span(origin.file, origin.offset, origin.nbytes)
                continue
            for begin, nbytes in cut.spans(start, size):
                yield Span(origin.file, origin.offset + begin, nbytes)

    def read(self, own: Contents[_Cut], target: memoryview, offset: int) -> None:
        done = 0
        with self._reader.open(own.path) as fd:
            for cut, start, size in own.within(offset, len(target)):
                piece = target[done : done + size]
                if cut.outer > 1:
                    self._gather(fd, cut, piece, start)
                else:
                    at = 0
                    for begin, nbytes in cut.spans(start, size):
                        self._reader.read(fd, cut.origin, piece[at : at + nbytes], begin)
                        at += nbytes
                done += size

    def _gather(self, fd: Opened, cut: _Cut, piece: memoryview, start: int) -> None:
        """Bytes of a small tensor that is cut along an inner axis."""
        whole = np.empty((cut.outer, cut.count, cut.inner), np.uint8)
        self._reader.read(fd, cut.origin, whole.reshape(-1).data, 0)
        data = np.ascontiguousarray(whole[:, list(cut.kept)]).reshape(-1)
        piece[:] = data[start : start + len(piece)].data
