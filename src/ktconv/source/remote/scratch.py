"""Temporary directories of this process; what killed processes left of theirs is removed.

A directory belongs to whoever has its file `.lock` locked, and nobody has that of a dead process.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktconv.system.files import io_error

PREFIX = "ktconv-mirror-"
_LOCK = ".lock"
_EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB
_locks: dict[Path, int] = {}  # descriptors


def make() -> Path:
    """A new directory. ResourceError or OutputError where the system refuses one."""
    if not _locks:
        remove_stale()
    try:
        root = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise io_error("write", tempfile.gettempdir(), error) from error
    with suppress(OSError):  # without locks: it stays if this process is killed
        _locks[root] = _locked(root)
    return root


def _locked(root: Path) -> int:
    """The lock appears under its name when it is locked, so that nobody takes it before."""
    part = root / f"{_LOCK}.part"
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, platform.node().encode())
        fcntl.flock(fd, _EXCLUSIVE)
        part.rename(root / _LOCK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove(root: Path) -> None:
    """Remove what `make` made."""
    shutil.rmtree(root, ignore_errors=True)
    if (fd := _locks.pop(root, None)) is not None:
        os.close(fd)


def remove_stale() -> None:
    """Remove directories of this user whose processes, of this machine, are dead."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found = [Path(one.path) for one in entries if one.name.startswith(PREFIX)]
        for root in found:
            with suppress(OSError), _taken(root):
                shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _taken(root: Path) -> Iterator[None]:
    """OSError for a directory of another user, of another machine, or in use."""
    about = root.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise PermissionError
    fd = os.open(root / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, _EXCLUSIVE)
        if os.read(fd, 1000) != platform.node().encode():
            raise PermissionError
        yield
    finally:
        os.close(fd)
