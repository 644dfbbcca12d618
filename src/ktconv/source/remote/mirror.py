"""The files of a directory that is read over a network, as a `system.stores.RemoteStore`."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec.structs import replace

from ktconv.errors import CheckpointError, SourceChangedError
from ktconv.source.remote import scratch
from ktconv.source.remote.ahead import AHEAD_BYTES, ReadAhead
from ktconv.source.remote.attempts import attempt, fetch
from ktconv.source.remote.cached import ByteCache
from ktconv.source.remote.store import RemoteFile, Store, open_store
from ktconv.source.remote.urls import Url, parse_url
from ktconv.system.files import FileTooShortError, translated
from ktconv.system.opened import ServedFile, State
from ktconv.system.pointers import refuse_pointer
from ktconv.system.regular_files import MissingFileError
from ktconv.system.stores import RemotePath, RemoteStore, Span, transfer
from ktconv.system.units import counted

MAX_FILES = 100_000
_WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".onnx",
    ".h5",
    ".msgpack",
)
_SMALL_BYTES = 64 << 20  # of files beside the weights that are fetched together


class RemoteDirectory(RemoteStore):
    """The files of a store. Small ones are copied to a directory of this machine when they are
    first used; it is removed when the process ends."""

    memory = AHEAD_BYTES

    def __init__(self, url: Url, cache_dir: Path | None, directory: Path) -> None:
        self._key, self._directory = (url, cache_dir), directory
        self.store = open_store(url)
        self._cache = None if cache_dir is None else ByteCache(url, cache_dir)
        listed = _checked(self.store, attempt(self.store, self.store.files))
        self._files = {file.name: file for file in listed}
        self._folders: dict[str, set[str]] = {"": set()}
        for name in self._files:
            for part in (inner := PurePosixPath(name), *inner.parents[:-1]):
                folder = "" if part.parent == PurePosixPath() else part.parent.as_posix()
                self._folders.setdefault(folder, set()).add(part.name)
        self.url, self.name = self.store.pinned, url.name  # pinned is known by now
        self.shown = self.url.shown
        self._ahead = ReadAhead(self._fetch)
        self._lock = threading.Lock()
        self._unconfirmed: set[str] = set()
        self._fetched: set[str] = set()
        transfer.add(stores=1)

    def __reduce__(self) -> Any:
        """Another process opens the URL again."""
        return _opened, self._key

    @property
    def root(self) -> RemotePath:
        return RemotePath(self)

    def remove(self) -> None:
        """Close it, and remove the copies."""
        self._ahead.close()
        transfer.add(stores=-1)
        scratch.remove(self._directory)

    def _file(self, path: Path) -> RemoteFile:
        assert isinstance(path, RemotePath)  # `path.store` is what was asked
        found = self._files.get(path.inner)
        if found is None:
            raise MissingFileError(f"{path} does not exist", "Check the URL.")
        return found

    def _fetch(self, name: str, start: int, stop: int) -> bytes | bytearray:
        """Exactly these bytes of a file."""
        ask = partial(fetch, self.store)
        if self._cache is None:
            return ask(name, start, stop)
        return self._cache.read(self._files[name], start, stop, ask)

    # ---- RemoteStore ----

    def kind(self, path: RemotePath) -> str:
        return "file" if path.inner in self._files else "folder" if self._names(path) else ""

    def names(self, path: RemotePath) -> Iterable[str]:
        return sorted(self._names(path))

    def _names(self, path: RemotePath) -> set[str]:
        return self._folders.get(path.inner, set())

    def open(self, path: Path) -> ServedFile:
        file = self._file(path)
        opened = ServedFile(path, State(file.nbytes, None, file.etag), partial(self.read, file))
        refuse_pointer(path, file.nbytes, lambda count: opened.take(count, 0))
        return opened

    def nbytes(self, path: RemotePath) -> int:
        return self._file(path).nbytes

    def read(self, file: RemoteFile, target: memoryview, offset: int) -> None:
        if offset + len(target) > file.nbytes:
            raise FileTooShortError
        self._ahead.read(file.name, target, offset)
        with self._lock:  # afterwards: a `confirm` in between may have asked before these bytes
            self._unconfirmed.add(file.name)

    def advise(self, spans: Sequence[Span]) -> None:
        wanted = []
        for span in spans:
            file = self._file(span.file)
            wanted.append((file.name, span.offset, min(span.offset + span.nbytes, file.nbytes)))
        self._ahead.want(wanted)

    def kept(self, spans: Iterable[Span]) -> int:
        if self._cache is None:
            return 0
        places = ((self._file(one.file), one.offset, one.nbytes) for one in spans)
        return sum(self._cache.kept(file, start, start + size) for file, start, size in places)

    def confirm(self) -> None:
        with self._lock:
            names, self._unconfirmed = sorted(self._unconfirmed), set()
        if not names:
            return
        try:
            now = attempt(self.store, lambda: self.store.state(names))
            self._compare(names, now)
        except BaseException:
            with self._lock:
                self._unconfirmed.update(names)
            raise

    def _compare(self, names: Sequence[str], now: Mapping[str, RemoteFile]) -> None:
        for name in names:
            before, found = self._files[name], now.get(name)
            if found is None or (found.nbytes, found.etag) != (before.nbytes, before.etag):
                what = "is gone" if found is None else "changed"
                raise SourceChangedError(
                    f"{self.url.shown}/{name} {what} while it was read",
                    "make sure nothing writes there, then start again",
                )

    def local(self, path: RemotePath) -> Path:
        for name, file in self._files.items():
            inside = name.startswith(f"{path.inner}/" if path.inner else "")
            if inside and file.nbytes <= _SMALL_BYTES and not name.endswith(_WEIGHTS):
                self._download(file)
        if path.inner not in self._folders:
            self._download(self._file(path))
        return self._directory / path.inner

    def _download(self, file: RemoteFile) -> None:
        path = self._directory / file.name
        with self._lock:
            if file.name in self._fetched:
                return
            data = self._fetch(file.name, 0, file.nbytes)
            temporary = path.parent / f".{path.name}.part"
            with translated("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(data)
                temporary.replace(path)
            self._fetched.add(file.name)
            self._unconfirmed.add(file.name)


def _checked(store: Store, files: Sequence[RemoteFile]) -> Sequence[RemoteFile]:
    """CheckpointError for names that would lead out of a directory, for none and for too many."""
    if not files:
        raise CheckpointError(f"{store.url.shown} contains no files", "Check the URL.")
    if len(files) > MAX_FILES:
        raise CheckpointError(
            f"{store.url.shown} contains {counted(len(files), 'file')}, more than a checkpoint has",
            "Give the directory of one checkpoint.",
        )
    for file in files:
        parts = PurePosixPath(file.name).parts
        if not parts or file.name.startswith("/") or ".." in parts or "\0" in file.name:
            raise CheckpointError(
                f"{store.url.shown} contains a file called {file.name!r}, which leads out of it",
                "Do not use it.",
            )
    return files


# ---- the stores of this process --------------------------------------------------------------

_stores: dict[Url, RemoteDirectory] = {}  # a directory is listed once
_opening = threading.Lock()


def open_remote(model: str, cache_dir: Path | None = None) -> RemotePath:
    """The directory that a URL names. `cache_dir`: keep what is read there, for other runs.

    Raises UsageError for a URL that is none or a package that is missing, and what a server's
    refusal means as CheckpointError or ResourceError.
    """
    return _opened(parse_url(model), cache_dir).root


def pinned(model: str) -> str:
    """The URL of exactly the state that `open_remote` opened."""
    url = parse_url(model)
    return replace(_opened(url, None).url, wanted=url.wanted).whole


def _opened(url: Url, cache_dir: Path | None) -> RemoteDirectory:
    # Web servers without listings have only what is asked for.
    wanted = url.wanted if url.scheme in ("http", "https") else None
    key = Url(url.scheme, url.place, url.revision, url.folder, wanted, url.query)
    with _opening:
        if key not in _stores:
            root = scratch.make()
            try:
                _stores[key] = RemoteDirectory(key, cache_dir, root)
            except BaseException:
                scratch.remove(root)
                raise
            atexit.register(_stores[key].remove)
        return _stores[key]
