"""Stores that serve the files of a source: this machine, or one that is read over a network.

A `RemotePath` names a file or directory of such a store. It knows its store, says its URL, lists
and joins like any path, and has no bytes on this machine: `system.opened` opens it, `local_path`
fetches what others must read by a name.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

from msgspec import Struct, field


class Span(Struct, frozen=True):
    """Bytes of a source file that will be read."""

    file: Path
    offset: int
    nbytes: int


class Transfer(Struct):
    """Requests and bytes of this process over a network."""

    requests: int = 0  # for bytes of files; what a redirect adds is not counted
    nbytes: int = 0
    retries: int = 0
    stores: int = 0  # that are open
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, requests: int = 0, nbytes: int = 0, retries: int = 0, stores: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.nbytes += nbytes
            self.retries += retries
            self.stores += stores


transfer = Transfer()


class FileStore(ABC):
    """A place that serves the files of a source. Safe to use from several threads."""

    memory: int  # bytes that reading needs at most, beside the buffers of who reads

    @abstractmethod
    def open(self, path: Path) -> Any:
        """The file, as an `opened.Opened`. MissingFileError where there is none."""

    @abstractmethod
    def advise(self, spans: Sequence[Span]) -> None:
        """Spans will be read soon, in this order. Only a hint: errors are found when they are."""

    def kept(self, spans: Iterable[Span]) -> int:
        """Bytes of spans that need no transfer."""
        return sum(span.nbytes for span in spans)

    def confirm(self) -> None:
        """SourceChangedError where a file that was read since the last call is another now. Files
        of this machine are checked whenever they are opened and closed."""
        return


class RemoteStore(FileStore):
    """A directory that is read over a network."""

    name: str  # what a user would call the directory
    shown: str  # its URL, without passwords and signatures

    @abstractmethod
    def nbytes(self, path: RemotePath) -> int:
        """The size of a file. MissingFileError where there is none."""

    @abstractmethod
    def kind(self, path: RemotePath) -> str:
        """`file`, `folder`, or empty for what is not there."""

    @abstractmethod
    def names(self, path: RemotePath) -> Iterable[str]:
        """Names of the files and folders in a folder."""

    @abstractmethod
    def local(self, path: RemotePath) -> Path:
        """A copy on this machine of a file, or of the small files in a folder."""


class RemotePath(PosixPath):
    """A file or folder of a remote store. Its text is a URL."""

    store: RemoteStore
    inner: str  # the name in the store, with slashes; empty: all of it

    def __new__(cls, store: RemoteStore, inner: str = "") -> RemotePath:
        return super().__new__(cls, store.shown, inner)

    def __init__(self, store: RemoteStore, inner: str = "") -> None:
        if sys.version_info >= (3, 12):
            super().__init__(store.shown, inner)
        self.store, self.inner = store, inner

    def __reduce__(self) -> Any:
        return RemotePath, (self.store, self.inner)

    def _at(self, inner: PurePosixPath) -> RemotePath:
        return RemotePath(self.store, "" if inner == PurePosixPath() else inner.as_posix())

    def __str__(self) -> str:
        return f"{self.store.shown}/{self.inner}" if self.inner else self.store.shown

    def __fspath__(self) -> str:
        return str(self)

    def __truediv__(self, key: Any) -> RemotePath:
        return self._at(PurePosixPath(self.inner) / key)

    @property
    def name(self) -> str:
        return PurePosixPath(self.inner).name or self.store.name

    @property
    def parent(self) -> RemotePath:
        return self._at(PurePosixPath(self.inner).parent)

    def with_name(self, name: str) -> RemotePath:
        return self._at(PurePosixPath(self.inner).with_name(name))

    def relative_to(self, *other: Any, **options: Any) -> Any:
        """The name within another folder of the store."""
        [folder] = other
        return PurePosixPath(self.inner).relative_to(folder.inner, **options)

    def exists(self, **_: Any) -> bool:
        return bool(self.store.kind(self))

    def is_file(self, **_: Any) -> bool:
        return self.store.kind(self) == "file"

    def is_dir(self, **_: Any) -> bool:
        return self.store.kind(self) == "folder"

    def is_symlink(self) -> bool:
        return False

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def absolute(self) -> RemotePath:
        return self

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        if not self.is_dir():
            raise NotADirectoryError(str(self)) if self.exists() else FileNotFoundError(str(self))
        return (self / name for name in self.store.names(self))

    def glob(self, pattern: Any, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Files and folders of the store whose names match, in order; `**` is any folders."""
        first, _slash, rest = str(pattern).partition("/")
        if not first:
            raise ValueError(f"Unacceptable pattern: {pattern!r}")
        here = sorted(self.iterdir()) if self.is_dir() else []
        if first == "**":
            yield from self.glob(rest) if rest else [self]
            for path in here:
                if path.is_dir():
                    yield from path.glob(pattern)
            return
        for path in here:
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else [path]

    def rglob(self, pattern: Any, **options: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        return self.glob(f"**/{pattern}", **options)


class MadePath(PosixPath):
    """A file that its store makes while it is read, of `origin` and more. Its text says of what."""

    store: FileStore
    origin: Path

    def __new__(cls, origin: Path, text: str, store: FileStore) -> MadePath:
        return super().__new__(cls, text)

    def __init__(self, origin: Path, text: str, store: FileStore) -> None:
        if sys.version_info >= (3, 12):
            super().__init__(text)
        self.origin, self.store = origin, store

    @property
    def name(self) -> str:
        return self.origin.name


def is_remote(path: Path) -> bool:
    """Whether a path is not of this machine."""
    return isinstance(path, RemotePath)


def local_path(path: Path) -> Path:
    """`path`, or the copy on this machine of a small remote file, or of those in a folder."""
    return path.store.local(path) if isinstance(path, RemotePath) else path
