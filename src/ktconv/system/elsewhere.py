"""Directories whose files are elsewhere: what is here are empty files with their names.

A source that is read over a network has such a directory, so that whatever lists and names files
works on it unchanged, and whatever reads one without asking here gets nothing instead of zeros.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a source file that will be read."""

    file: Path
    offset: int
    nbytes: int


@dataclass(slots=True)
class Transfer:
    """What this process received from elsewhere."""

    requests: int = 0  # for bytes of files; what a redirect adds is not counted
    nbytes: int = 0
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, requests: int = 0, nbytes: int = 0, retries: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.nbytes += nbytes
            self.retries += retries


transfer = Transfer()


class Elsewhere(ABC):
    """What serves the files of registered directories. Safe to use from several threads."""

    memory: int  # bytes that it needs at most

    @abstractmethod
    def open(self, path: Path) -> Any:
        """The file, as an `opened.Opened`. MissingFileError where there is none."""

    @abstractmethod
    def nbytes(self, path: Path) -> int:
        """The size of a file. MissingFileError where there is none."""

    @abstractmethod
    def advise(self, spans: Sequence[Span]) -> None:
        """These will be read soon, in this order."""

    @abstractmethod
    def kept(self, spans: Iterable[Span]) -> int:
        """Bytes of these that need no transfer, since an earlier run kept them."""

    @abstractmethod
    def confirm(self) -> None:
        """SourceChangedError where a file that was read since the last call is another now."""

    @abstractmethod
    def materialize(self, path: Path) -> None:
        """Make `path` what it stands for: a small file, or all small files of a directory."""


_directories: dict[Path, Elsewhere] = {}


def register(directories: Iterable[Path], elsewhere: Elsewhere) -> None:
    """Files of these directories, not of those in them, are read from `elsewhere`."""
    for directory in directories:
        _directories[directory] = elsewhere


def forget(directories: Iterable[Path]) -> None:
    """The opposite of `register`."""
    for directory in directories:
        _directories.pop(directory, None)


def elsewhere_of(path: Path) -> Elsewhere | None:
    """What serves `path`, a file or a registered directory; None: it is on this machine."""
    if not _directories:
        return None
    return _directories.get(path.parent) or _directories.get(path)


def in_use() -> bool:
    """Whether some source of this process is elsewhere."""
    return bool(_directories)


def advise(spans: Sequence[Span], local: Callable[[Sequence[Span]], None]) -> None:
    """These will be read soon, in this order; `local` is for files of this machine."""
    by_place: dict[Elsewhere | None, list[Span]] = {}
    for span in spans:
        by_place.setdefault(elsewhere_of(span.file), []).append(span)
    for found, wanted in by_place.items():
        if found is None:
            local(wanted)
        else:
            found.advise(wanted)


def memory() -> int:
    """Bytes that reading from elsewhere needs at most, in this process."""
    return sum(one.memory for one in {id(one): one for one in _directories.values()}.values())


def confirm(files: Iterable[Path]) -> None:
    """SourceChangedError where one of these is elsewhere and has changed since it was read; local
    files are checked whenever they are opened and closed."""
    for found in {id(one): one for one in map(elsewhere_of, files) if one is not None}.values():
        found.confirm()


def materialize(path: Path) -> None:
    """Fetch a small file, or those of a directory, if they are elsewhere."""
    if (found := elsewhere_of(path)) is not None:
        found.materialize(path)
