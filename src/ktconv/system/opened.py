"""Files of a source that are open for reading, on this machine or in a remote store."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ktconv.system.files import opened_fd, read_ahead, read_exactly
from ktconv.system.regular_files import open_regular, unreadable
from ktconv.system.stores import FileStore, MadePath, RemotePath, Span


class State(NamedTuple):
    """State of a file, by which a change is noticed."""

    nbytes: int
    mtime_ns: int | None  # when it was last written; None for a remote file
    etag: str | None  # identifies its content where it is served; None for one of this machine


class Opened(ABC):
    """A file that is open for reading. Safe to use from several threads."""

    path: Path
    descriptor: int | None = None  # of a file of this machine, for what maps it

    @property
    @abstractmethod
    def state(self) -> State:
        """State at this moment."""

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
        self.descriptor: int = open_regular(path)

    @property
    def state(self) -> State:
        try:
            found = os.fstat(self.descriptor)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return State(found.st_size, found.st_mtime_ns, None)

    def read(self, target: memoryview, offset: int) -> None:
        read_exactly(self.descriptor, target, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class ServedFile(Opened):
    """A file of another store, whose state is known; `fill(target, offset)` reads or makes bytes
    from `offset` on."""

    def __init__(self, path: Path, state: State, fill: Callable[[memoryview, int], None]) -> None:
        self.path, self._state, self._fill = path, state, fill

    @property
    def state(self) -> State:
        return self._state

    def read(self, target: memoryview, offset: int) -> None:
        self._fill(target.cast("B"), offset)

    def close(self) -> None:
        pass


class LocalStore(FileStore):
    """The files of this machine."""

    memory = 0

    def open(self, path: Path) -> LocalFile:
        return LocalFile(path)

    def advise(self, spans: Sequence[Span]) -> None:
        for file, following in groupby(spans, lambda span: span.file):
            with suppress(OSError), opened_fd(file, os.O_RDONLY | os.O_NONBLOCK) as fd:
                for start, stop in _joined(following):
                    read_ahead(fd, start, stop - start)


def _joined(spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    """First byte and end of each run of neighbours: experts lie one behind the other."""
    start = stop = 0
    for span in spans:
        if span.offset != stop:
            if stop > start:
                yield start, stop
            start = span.offset
        stop = span.offset + span.nbytes
    if stop > start:
        yield start, stop


LOCAL = LocalStore()


def store_of(path: Path) -> FileStore:
    """The store that serves a file or directory."""
    return path.store if isinstance(path, RemotePath | MadePath) else LOCAL


def advise(spans: Sequence[Span]) -> None:
    """Ask for spans to be read ahead, in this order: the system, or what serves remote files. Only
    a hint: errors are found when the bytes are read."""
    by_store: dict[FileStore, list[Span]] = {}
    for span in spans:
        by_store.setdefault(store_of(span.file), []).append(span)
    for store, wanted in by_store.items():
        store.advise(wanted)


def open_source(path: Path) -> Opened:
    """A file of a source. Raises as `regular_files.open_regular`."""
    opened: Opened = store_of(path).open(path)
    return opened


def opened_source(path: Path) -> AbstractContextManager[Opened]:
    """`open_source`, closed at the end."""
    return closing(open_source(path))
