"""Reading the bytes of a checkpoint while it is converted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.errors import ResourceError, SourceChangedError
from ktconv.source import BlockGrid, SourceFile, TensorRef
from ktconv.system.files import FileTooShortError, io_error
from ktconv.system.opened import Opened, State, open_source
from ktconv.system.opened import advise as advise
from ktconv.system.regular_files import MissingFileError
from ktconv.system.stores import Span as Span
from ktconv.system.text import path_text

BOUNCE_BYTES = 1 << 20
MAPPED_ALIGNMENT = 8  # of bytes in a file: elements of every dtype are aligned then
KEPT_FILES = 32  # per unit of commit, of which few are under way


class Runs(Struct, frozen=True):
    """`count` runs of `length` bytes, `stride` bytes apart, from `start` on of a tensor."""

    start: int
    length: int
    stride: int
    count: int


class SourceReader:
    """Reads spans of source files; refuses a file that changed since it was opened."""

    maps: ClassVar[bool] = True  # files of this machine, rather than read them

    def __init__(self, files: Sequence[Path], sources: Sequence[SourceFile]) -> None:
        known = {
            source.name: State(source.nbytes, source.mtime_ns, source.etag)
            for source in sources
            if (source.mtime_ns, source.etag) != (None, None)
        }
        self._state: Mapping[Path, State] = {
            path: known[name] for path in files if (name := path_text(path.name)) in known
        }

    @contextmanager
    def open(self, path: Path) -> Iterator[Opened]:
        """A shard that is as it was when the headers were read, to the end."""
        opened = _open(path)
        try:
            self._refuse_changed(opened)
            try:
                yield opened
            finally:  # also where reading failed: that can be the change's doing
                self._refuse_changed(opened)
        finally:
            opened.close()

    def joined(self, other: SourceReader) -> SourceReader:
        """A reader of the files of both."""
        both = SourceReader((), ())
        both._state = {**self._state, **other._state}
        return both

    def keeping(self) -> KeptReader:
        """One that keeps files open from one matrix to the next."""
        return KeptReader(self._state)

    def _refuse_changed(self, opened: Opened) -> None:
        known = self._state.get(opened.path)
        if known is not None and known != opened.state:
            raise SourceChangedError(
                f"{opened.path} changed while it was read",
                "make sure nothing writes there, then start again",
            )

    def found_zeros(self, scale: BlockGrid, count: int) -> None:
        """Report that `count` scales of a matrix are zero, to whoever counts them."""

    def read(self, fd: Opened, tensor: TensorRef, target: memoryview, offset: int) -> None:
        """Bytes from `offset` on of a tensor."""
        try:
            fd.read(target, tensor.offset + offset)
        except OSError as error:
            raise io_error(f"read tensor {tensor.name} from", tensor.file, error) from error

    def mapped(
        self, fd: Opened, tensor: TensorRef, nbytes: int, offset: int
    ) -> native.Mapped | None:
        """`nbytes` from `offset` on of a tensor, as memory; None: they must be read. After their
        use, `refuse_lost` tells whether they were the file's."""
        start = tensor.offset + offset
        if fd.descriptor is None or not self.maps or start % MAPPED_ALIGNMENT:
            return None
        return native.map_file(fd.descriptor, nbytes, start)

    def refuse_lost(
        self, fd: Opened, tensor: TensorRef, offset: int, mapped: native.Mapped
    ) -> None:
        """Raise what reading raises, if bytes of `mapped` could not be read when they were used."""
        if mapped.lost:
            self.read(fd, tensor, memoryview(bytearray(mapped.data.nbytes)), offset)
            raise io_error(f"read tensor {tensor.name} from", tensor.file, FileTooShortError())

    def read_runs(
        self, fd: Opened, tensor: TensorRef, target: memoryview, runs: Runs, bounce: memoryview
    ) -> None:
        """All runs, one behind the other. Short runs are read with the gaps between them,
        through `bounce`: a large read and a copy cost less than many small reads."""
        if runs.stride == runs.length:
            self.read(fd, tensor, target, runs.start)
        elif runs.stride <= min(4 * runs.length, len(bounce)):
            self._read_with_gaps(fd, tensor, target, runs, bounce)
        else:
            for run in range(runs.count):
                piece = target[run * runs.length : (run + 1) * runs.length]
                self.read(fd, tensor, piece, runs.start + run * runs.stride)

    def _read_with_gaps(
        self, fd: Opened, tensor: TensorRef, target: memoryview, runs: Runs, bounce: memoryview
    ) -> None:
        per_read = len(bounce) // runs.stride
        dense = np.frombuffer(target, np.uint8).reshape(runs.count, runs.length)
        for first in range(0, runs.count, per_read):
            count = min(per_read, runs.count - first)
            span = bounce[: (count - 1) * runs.stride + runs.length]
            self.read(fd, tensor, span, runs.start + first * runs.stride)
            dense[first : first + count] = np.ndarray(
                (count, runs.length), np.uint8, span, strides=(runs.stride, 1)
            )


class KeptReader(SourceReader):
    """Opens each file once, of a few: to open and to look at a file for each of many small matrices
    takes longer than to convert them, and threads wait for each other after every call of the
    system. What was read counts only after `confirm`, unless reading failed."""

    def __init__(self, state: Mapping[Path, State]) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._kept: dict[Path, Opened] = {}
        self._zeros: dict[tuple[str, int, int, int], int] = {}

    @property
    def zero_scales(self) -> int:
        """Number of zero scales in the matrices that were read."""
        return sum(self._zeros.values())

    def found_zeros(self, scale: BlockGrid, count: int) -> None:
        """A matrix that is read twice counts once."""
        if count:
            place = scale.tensor.name, scale.start, scale.row_origin, scale.col_origin
            self._zeros[place] = count

    @contextmanager
    def open(self, path: Path) -> Iterator[Opened]:
        opened = self._kept.get(path) or self._keep(path)
        if opened is None:
            with super().open(path) as opened:
                yield opened
            return
        try:
            yield opened
        except BaseException:  # that can be the change's doing
            self._refuse_changed(opened)
            raise

    def _keep(self, path: Path) -> Opened | None:
        """None: enough are open."""
        with self._lock:
            if path not in self._kept and len(self._kept) < KEPT_FILES:
                self._kept[path] = _open(path)
                self._refuse_changed(self._kept[path])
            return self._kept.get(path)

    def confirm(self) -> None:
        """Refuses files that changed since they were opened, or are others now."""
        for path in list(self._kept):
            with super().open(path):
                pass

    def close(self) -> None:
        """Nobody reads any more."""
        while self._kept:
            self._kept.popitem()[1].close()


def _open(path: Path) -> Opened:
    try:
        return open_source(path)
    except MissingFileError as error:  # it was there when the headers were read
        raise ResourceError(f"cannot read {path}: No such file or directory") from error
