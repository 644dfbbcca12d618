"""A remote directory that is a local one, read as a server would serve it, with faults."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ktconv.errors import CheckpointError, KtconvError
from ktconv.source.remote import mirror
from ktconv.source.remote.store import RemoteFile, Store
from ktconv.source.remote.urls import Url


def close_stores() -> None:
    """Forget all stores of this process, and remove their copies."""
    with mirror._opening:
        for found in mirror._stores.values():
            atexit.unregister(found.remove)
            found.remove()
        mirror._stores.clear()


class ResetError(OSError):
    """A connection that breaks."""


class FolderStore(Store):
    """Serves `folder`. `fault` gets the number of each read, from 0 on, and may raise, or change
    what is sent; reads are recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, Url("hf", f"org/{folder.name}", "main")
        self.reads: list[tuple[str, int, int]] = []
        self.states = 0
        self.fault: Callable[[int, bytes], bytes] = lambda _, data: data
        self._lock = threading.Lock()

    def files(self) -> Sequence[RemoteFile]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [self._about(path.relative_to(self.folder).as_posix()) for path in paths]

    def _about(self, name: str) -> RemoteFile:
        status = (self.folder / name).stat()
        return RemoteFile(name, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")

    def read(self, name: str, start: int, stop: int) -> bytes:
        with self._lock:
            number = len(self.reads)
            self.reads.append((name, start, stop))
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return self.fault(number, file.read(stop - start))

    def state(self, names: Iterable[str]) -> Mapping[str, RemoteFile]:
        self.states += 1
        return {name: self._about(name) for name in names if (self.folder / name).exists()}

    def transient(self, error: BaseException) -> bool:
        return isinstance(error, ResetError)

    def explain(self, error: BaseException) -> KtconvError:
        return CheckpointError(f"{self.url.shown}: {error}", "Try again.")

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.reads)
