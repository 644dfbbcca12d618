"""The folder in which a pass keeps its state, found again by what the pass is made of.

DIR/<key>/               states, and whatever else the pass keeps there
DIR/<key>/.ktconv/       run.json with the identity of the pass; the lock
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ktconv.errors import InUseError, KtconvError, OutputError, UsageError
from ktconv.model.streamed.states import STATE_FILE
from ktconv.source import Checkpoint, source_identity
from ktconv.system.files import make_directory, remove, remove_empty
from ktconv.system.text import Notify, silent
from ktconv.writer.journal import Journal, OutputLock

STALE_SECONDS = 30 * 24 * 3600
_PACKAGES = ("ktconv", "torch", "transformers")
_KEY_LENGTH = 32  # hexadecimal digits
_KEY = re.compile("[0-9a-f]{32}")
_MARK = "pass"  # key of run.json that says that a folder is ours
_LOCK_BYTE = 0


def pass_identity(
    kind: str, checkpoint: Checkpoint, windows: Iterable[bytes], **more: Any
) -> dict[str, Any]:
    """Identity of a pass and its results, JSON-ready: what is done, the files of the source, the
    bytes of the token ids of each window, versions of packages, and `more`."""
    ids = hashlib.sha256()
    for window in windows:
        ids.update(len(window).to_bytes(8, "little") + window)
    return {
        "kind": kind,
        "source": source_identity(checkpoint),
        "windows": ids.hexdigest(),
        "versions": {name: _version(name) for name in _PACKAGES},
        **more,
    }


def default_root() -> Path:
    """Folder for the state of passes if --work-dir names none: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(cache).is_absolute():  # the specification says to ignore others
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:
            raise UsageError(
                "the state of the pass has no place: this user has no home directory",
                "use --work-dir DIR",
            ) from None
    return Path(cache) / "ktconv" / "passes"


def pass_folder(identity: Mapping[str, Any], root: Path | None = None) -> Path:
    """Folder for the state of a pass, below `root` or the default."""
    canonical = json.dumps(identity, sort_keys=True)
    key = hashlib.sha256(canonical.encode()).hexdigest()[:_KEY_LENGTH]
    return (default_root() if root is None else root) / key


class WorkFolder:
    """The folder of one pass, locked until `close`.

    It is removed by `complete`, and by `close` if no state was committed in it; else the same pass
    goes on there. Folders of passes that nobody went on with for 30 days are removed. Raises
    InUseError if another process makes the same pass.
    """

    def __init__(
        self, identity: Mapping[str, Any], root: Path | None = None, notify: Notify = silent
    ) -> None:
        self.path = pass_folder(identity, root)
        place = self.path.parent
        self._journal = Journal(self.path)
        self._open = False
        with _way_out(None if root else "use --work-dir DIR"):
            make_directory(place)
            _refuse_links(self._journal)
            self._lock = OutputLock(self._journal)
            self._take(notify)
            try:
                self._journal.write_run({_MARK: 1, "identity": dict(identity)})
                _remove_stale(place, self.path, notify)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def complete(self) -> None:
        """The pass has ended and its results are elsewhere: remove the folder."""
        self._end(keep=False)

    def close(self) -> None:
        """Let go of the folder, and remove it if there is nothing to go on from."""
        self._end(keep=(self.path / STATE_FILE).exists())

    def _take(self, notify: Notify) -> None:
        with self._lock.setup_lock(notify):
            if not self._lock.try_acquire({_LOCK_BYTE}):
                raise InUseError(
                    f"another ktconv is making the same pass in {self.path}",
                    "wait until it has ended, then run the same command again",
                )
        self._open = True

    def _end(self, keep: bool) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if not keep:
                with self._lock.setup_lock():
                    remove(self.path, but_held=True)
        finally:
            self._lock.release()
            if not keep:
                remove_empty(self._journal.directory, self.path)


@contextmanager
def _way_out(hint: str | None) -> Iterator[None]:
    """Give errors this hint, but for a pass that is under way."""
    try:
        yield
    except KtconvError as error:
        if not isinstance(error, InUseError):
            error.hint = hint or error.hint
        raise


def _refuse_links(journal: Journal) -> None:
    """OutputError where the folder is elsewhere: what it contains is going to be removed."""
    for path in (journal.output, journal.directory):
        if path.is_symlink():
            raise OutputError(f"{path} is a link", "remove it, or use another --work-dir DIR")


def _remove_stale(root: Path, but: Path, notify: Notify) -> None:
    for folder in sorted(set(_passes(root)) - {but}):
        if time.time() - _last_change(folder) < STALE_SECONDS:
            continue
        lock = OutputLock(Journal(folder))
        try:
            with lock.setup_lock(patience=0):
                if lock.try_acquire({_LOCK_BYTE}):
                    remove(folder, but_held=True)
                    notify(f"removed {folder}, a pass that ended early more than 30 days ago")
        except (KtconvError, OSError) as error:  # it may be another user's
            notify(f"{folder} is kept: {error}")
        finally:
            lock.release()
            remove_empty(Journal(folder).directory, folder)


def _passes(root: Path) -> Iterator[Path]:
    """Folders of passes, by their names and what is in them."""
    for path in root.iterdir():
        journal = Journal(path)
        ours = _KEY.fullmatch(path.name) and not path.is_symlink()
        if ours and journal.directory.is_dir() and not journal.directory.is_symlink():
            with contextlib.suppress(KtconvError):
                if _MARK in (journal.peek_run() or {}):
                    yield path


def _last_change(folder: Path) -> float:
    """When something was created, replaced or removed in a folder, in seconds."""
    with contextlib.suppress(OSError):
        return max(path.lstat().st_mtime for path in (folder, Journal(folder).run_file))
    return time.time()


@cache  # each call reads and parses the metadata of the package
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
