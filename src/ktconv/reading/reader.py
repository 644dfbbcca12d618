"""Reading the bytes of a checkpoint while it is converted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktconv.checkpoint import SourceFile, TensorRef
from ktconv.errors import ResourceError, SourceChangedError
from ktconv.system.files import io_error, read_exactly
from ktconv.system.regular_files import MissingFileError, open_regular
from ktconv.system.text import path_text

BOUNCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a source file that a task will read."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Runs:
    """`count` runs of `length` bytes, `stride` bytes apart, from `start` on of a tensor."""

    start: int
    length: int
    stride: int
    count: int


class SourceReader:
    """Reads spans of source files; refuses a file that changed since it was opened."""

    def __init__(self, files: Sequence[Path], sources: Sequence[SourceFile]) -> None:
        known = {source.name: source for source in sources if source.mtime_ns is not None}
        self._state = {
            path: (known[name].nbytes, known[name].mtime_ns)
            for path in files
            if (name := path_text(path.name)) in known
        }

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """A descriptor of a shard that is as it was when the headers were read, to the end."""
        try:
            fd = open_regular(path)
        except MissingFileError as error:  # it was there when the headers were read
            raise ResourceError(f"cannot read {path}: No such file or directory") from error
        try:
            self._refuse_changed(fd, path)
            try:
                yield fd
            finally:  # also where reading failed: that can be the change's doing
                self._refuse_changed(fd, path)
        finally:
            os.close(fd)

    def _refuse_changed(self, fd: int, path: Path) -> None:
        status = os.fstat(fd)
        if self._state.get(path) not in (None, (status.st_size, status.st_mtime_ns)):
            raise SourceChangedError(
                f"{path} changed while it was read",
                "make sure nothing writes there, then start again",
            )

    def read(self, fd: int, tensor: TensorRef, target: memoryview, offset: int) -> None:
        """Bytes from `offset` on of a tensor."""
        try:
            read_exactly(fd, target, tensor.offset + offset)
        except OSError as error:
            raise io_error(f"read tensor {tensor.name} from", tensor.file, error) from error

    def read_runs(
        self, fd: int, tensor: TensorRef, target: memoryview, runs: Runs, bounce: memoryview
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
        self, fd: int, tensor: TensorRef, target: memoryview, runs: Runs, bounce: memoryview
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
