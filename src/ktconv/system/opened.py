"""Files of a source that are open for reading, on this machine or elsewhere."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ktconv.system.elsewhere import elsewhere_of
from ktconv.system.files import read_exactly
from ktconv.system.pointers import refuse_pointer
from ktconv.system.regular_files import open_regular, unreadable


class State(NamedTuple):
    """What tells whether a file changed."""

    nbytes: int
    mtime_ns: int | None  # when it was last written; None for a file that is elsewhere
    etag: str | None  # identifies its content where it is served; None for one of this machine


class Opened(ABC):
    """A file that is open for reading. Safe to use from several threads."""

    path: Path

    @property
    @abstractmethod
    def state(self) -> State:
        """Of this moment."""

    @abstractmethod
    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. OSError where that fails,
        FileTooShortError where the file ends before."""

    @abstractmethod
    def close(self) -> None: ...

    def take(self, count: int, offset: int) -> bytes:
        """`count` bytes from `offset` on."""
        data = bytearray(count)
        self.read(memoryview(data), offset)
        return bytes(data)


class LocalFile(Opened):
    """A regular file of this machine. Raises as `regular_files.open_regular`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)

    @property
    def state(self) -> State:
        try:
            found = os.fstat(self._descriptor)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return State(found.st_size, found.st_mtime_ns, None)

    def read(self, target: memoryview, offset: int) -> None:
        read_exactly(self._descriptor, target, offset)

    def close(self) -> None:
        os.close(self._descriptor)


def open_source(path: Path) -> Opened:
    """A file of a source. Raises as `regular_files.open_regular`."""
    elsewhere = elsewhere_of(path)
    if elsewhere is None:
        return LocalFile(path)
    opened: Opened = elsewhere.open(path)
    try:
        refuse_pointer(path, opened.state.nbytes, lambda count: opened.take(count, 0))
    except BaseException:
        opened.close()
        raise
    return opened


@contextmanager
def opened_source(path: Path) -> Iterator[Opened]:
    """`open_source`, closed at the end."""
    opened = open_source(path)
    try:
        yield opened
    finally:
        opened.close()
