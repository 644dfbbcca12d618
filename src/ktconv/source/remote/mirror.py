"""A local directory that stands for a remote one: empty files with the names of those there.

Headers and weights are read through `system.opened`, which asks here; files beside the weights are
fetched when they are first used. The directory is removed when the process ends.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from ktconv.errors import CheckpointError, SourceChangedError, show_as
from ktconv.source.remote import scratch
from ktconv.source.remote.ahead import AHEAD_BYTES, ReadAhead
from ktconv.source.remote.attempts import attempt, fetch
from ktconv.source.remote.store import RemoteFile, Store, open_store, with_cache
from ktconv.source.remote.urls import Url, parse_url
from ktconv.system.elsewhere import Elsewhere, Span, forget, register
from ktconv.system.files import FileTooShortError, translated
from ktconv.system.opened import Opened, State
from ktconv.system.regular_files import MAX_SMALL_BYTES, MissingFileError

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


class RemoteDirectory(Elsewhere):
    """The files of a store under a directory of this machine."""

    memory = AHEAD_BYTES

    def __init__(self, store: Store, directory: Path) -> None:
        self.store, self.directory = store, directory
        self._files = {file.name: file for file in _checked(store, attempt(store, store.files))}
        self.url = store.pinned  # known by now
        self._ahead = ReadAhead(lambda name, start, stop: fetch(store, name, start, stop))
        self._lock = threading.Lock()
        self._unconfirmed: set[str] = set()
        self._fetched: set[str] = set()

    def place(self) -> None:
        """Make the empty files."""
        folders = {self.directory}
        for name in self._files:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            folders.add(path.parent)
        register(folders, self)
        show_as(str(self.directory), self.url.shown)

    def remove(self) -> None:
        self._ahead.close()
        folders = [self.directory, *(path for path in self.directory.rglob("*") if path.is_dir())]
        forget(folders)
        scratch.remove(self.directory.parent)

    def _file(self, path: Path) -> RemoteFile:
        found = self._files.get(path.relative_to(self.directory).as_posix())
        if found is None:
            raise MissingFileError(f"{path} does not exist", "Check the URL.")
        return found

    # ---- Elsewhere ----

    def open(self, path: Path) -> RemoteOpened:
        return RemoteOpened(self, path, self._file(path))

    def nbytes(self, path: Path) -> int:
        return self._file(path).nbytes

    def read(self, file: RemoteFile, target: memoryview, offset: int) -> None:
        if offset + len(target) > file.nbytes:
            raise FileTooShortError("the file ends too early")
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
        return sum(
            self.store.kept(self._file(one.file).name, one.offset, one.offset + one.nbytes)
            for one in spans
        )

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

    def materialize(self, path: Path) -> None:
        if path != self.directory:
            if path in (self.directory / folder for folder in self._folders()):
                return
            self._download(self._file(path))
            return
        for file in self._files.values():
            if file.nbytes <= _SMALL_BYTES and not file.name.endswith(_WEIGHTS):
                self._download(file)

    def _folders(self) -> set[str]:
        return {str(parent) for name in self._files for parent in PurePosixPath(name).parents}

    def _download(self, file: RemoteFile) -> None:
        if file.nbytes > MAX_SMALL_BYTES:
            return  # the size of the empty file says nothing: `opened_small` would take it
        path = self.directory / file.name
        with self._lock:
            if file.name in self._fetched:
                return
            data = fetch(self.store, file.name, 0, file.nbytes)
            temporary = path.with_name(f".{path.name}.part")
            with translated("write", path):
                temporary.write_bytes(data)
                temporary.replace(path)
            self._fetched.add(file.name)
            self._unconfirmed.add(file.name)


class RemoteOpened(Opened):
    """A remote file that is read through the read-ahead of its directory."""

    def __init__(self, directory: RemoteDirectory, path: Path, file: RemoteFile) -> None:
        self.path, self._directory, self._file = path, directory, file

    @property
    def state(self) -> State:
        return State(self._file.nbytes, None, self._file.etag)

    def read(self, target: memoryview, offset: int) -> None:
        self._directory.read(self._file, target, offset)

    def close(self) -> None:
        pass


def _checked(store: Store, files: Sequence[RemoteFile]) -> Sequence[RemoteFile]:
    """CheckpointError for names that would lead out of a directory, for none and for too many."""
    if not files:
        raise CheckpointError(f"{store.url.shown} contains no files", "Check the URL.")
    if len(files) > MAX_FILES:
        raise CheckpointError(
            f"{store.url.shown} contains {len(files)} files, more than a checkpoint has",
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


# ---- the mirrors of this process -------------------------------------------------------------

_mirrors: dict[Url, RemoteDirectory] = {}
_opening = threading.Lock()


def open_remote(model: str, cache_dir: Path | None = None) -> Path:
    """The local directory that stands for the one that a URL names; the same one whenever the same
    URL is given. `cache_dir`: keep what is read there, for other runs.

    Raises UsageError for a URL that is none or a package that is missing, and what a server's
    refusal means as CheckpointError or ResourceError.
    """
    return _opened(parse_url(model), cache_dir).directory


def pinned(model: str) -> str:
    """The URL of exactly the state that `open_remote` opened."""
    url = parse_url(model)
    found = _opened(url, None).url
    return found.shown + (f":{url.wanted}" if url.wanted else "")


def _opened(url: Url, cache_dir: Path | None) -> RemoteDirectory:
    # Web servers without listings have only what is asked for.
    wanted = url.wanted if url.scheme in ("http", "https") else None
    key = Url(url.scheme, url.place, url.revision, url.folder, wanted, url.query)
    with _opening:
        if key not in _mirrors:
            store = open_store(key)
            if cache_dir is not None:
                store = with_cache(store, cache_dir)
            root = scratch.make()
            try:
                directory = root / key.name
                directory.mkdir()
                found = RemoteDirectory(store, directory)
                with translated("write", directory):
                    found.place()
            except BaseException:
                scratch.remove(root)
                raise
            atexit.register(found.remove)
            _mirrors[key] = found
        return _mirrors[key]


def close_all() -> None:
    """Forget and remove all mirrors of this process; for tests."""
    with _opening:
        for found in _mirrors.values():
            atexit.unregister(found.remove)
            found.remove()
        _mirrors.clear()
