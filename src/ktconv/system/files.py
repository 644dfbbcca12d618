"""Durable files: written in place under a temporary name, fsynced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ktconv.errors import (
    DiskFullError,
    FileSizeError,
    KtconvError,
    OutputError,
    ResourceError,
    UsageError,
)

_AGAIN = "free some space, then run the same command again"
_OTHER_PLACE = "choose a directory that can be written"
_OPEN_FILES = "raise the limit of open files (ulimit -n)"
_KINDS: dict[int, tuple[type[ResourceError], str, str | None]] = {  # class, reason, hint
    errno.ENOSPC: (DiskFullError, "the disk is full", _AGAIN),
    errno.EDQUOT: (DiskFullError, "the disk quota is used up", _AGAIN),
    errno.EROFS: (ResourceError, "the file system is read-only", _OTHER_PLACE),
    errno.EACCES: (ResourceError, "permission denied", _OTHER_PLACE),
    errno.EPERM: (ResourceError, "permission denied", _OTHER_PLACE),
    errno.EIO: (ResourceError, "the device reports an I/O error", None),
    errno.EFBIG: (
        FileSizeError,
        "files this large are not allowed here",
        "raise the limit of the file system or process",
    ),
    errno.ENAMETOOLONG: (ResourceError, "the name is too long", "choose a shorter name"),
    errno.EMFILE: (ResourceError, "too many open files", _OPEN_FILES),
    errno.ENFILE: (ResourceError, "too many open files on this machine", None),
}
_READABLE = "make it readable for this user"
BEHIND_BYTES = 64 << 10  # smaller pieces wait for fsync
AHEAD_BYTES = 512 << 10  # read ahead in one call
MKDIR_ATTEMPTS = 20  # each fails only if another run makes or removes a directory meanwhile


def way_out(error: OSError) -> str | None:
    """Hint for an error of the operating system; None if none is known."""
    hint = _KINDS.get(error.errno or 0, (None, None, None))[2]
    return None if hint == _OTHER_PLACE else hint


def io_error(action: str, path: str | Path, error: OSError) -> KtconvError:
    """An OSError as one sentence that names the file. `action` is a verb: "read", "write"."""
    code = error.errno or 0
    unknown = os.strerror(code) if code else str(error)
    kind, reason, hint = _KINDS.get(code, (ResourceError, unknown, None))
    if action.split()[0] == "read" and hint == _OTHER_PLACE:
        hint = _READABLE
    return kind(f"cannot {action} {path}: {reason}", hint)


@contextmanager
def translated(action: str, path: str | Path) -> Iterator[None]:
    """Turns an OSError inside into a ResourceError about `path`."""
    try:
        yield
    except OSError as error:
        raise io_error(action, path, error) from error


@contextmanager
def opened_fd(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a file or directory, closed at the end."""
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """pwrite until everything is written."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def write_behind(fd: int, data: memoryview, offset: int) -> None:
    """`write_all`, and the system begins to bring a large piece to the disk: what a later fsync
    waits for is short, and the disk does not idle while later pieces are computed."""
    write_all(fd, data, offset)
    if len(data) >= BEHIND_BYTES:
        with contextlib.suppress(OSError):  # a hint; Linux starts writing pages that are dirty
            os.posix_fadvise(fd, offset, len(data), os.POSIX_FADV_DONTNEED)


def read_ahead(fd: int, offset: int, nbytes: int) -> None:
    """Ask the system to read a span into the page cache; it goes on without waiting. In pieces:
    of a longer one Linux reads no more than a request to the device has, or its read-ahead."""
    for start in range(offset, offset + nbytes, AHEAD_BYTES):
        length = min(AHEAD_BYTES, offset + nbytes - start)
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_WILLNEED)


class FileTooShortError(OSError):
    """A file ends before what should be read of it does."""

    def __init__(self, words: str = "the file ends too early") -> None:
        super().__init__(words)


def read_exactly(fd: int, target: memoryview, offset: int) -> None:
    """preadv until `target` is full; FileTooShortError if the file ends before."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise FileTooShortError
        done += count


def allocate(fd: int, size: int) -> None:
    """Give a new file its final size, so that a full disk shows now and not later."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def sync(path: Path) -> None:
    """Make a file, or what was created or renamed in a directory, survive a power loss."""
    with opened_fd(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def sync_names(path: Path) -> None:
    """Make the name of a directory, and those of the directories that it is in, survive a power
    loss, whoever created them: a run that was killed may not have come to it."""
    path = Path(os.path.realpath(path))
    with translated("write", path):
        device = path.stat().st_dev
        for parent in path.parents:
            if parent.stat().st_dev != device:  # what is mounted there was not created by mkdir
                return
            _sync_readable(parent)


def _sync_readable(directory: Path) -> None:
    """`sync`, unless the directory may be entered but not read, or was removed."""
    with contextlib.suppress(PermissionError, FileNotFoundError):
        sync(directory)


def write_durably(
    path: Path, data: bytes | Iterable[bytes], staging: Path, name: str | None = None
) -> None:
    """Replace `path` by `data` in one step; after return it survives a power loss.

    The temporary file is in `staging`, a directory of the same file system. Its name, `name` or
    what follows from `path`, is always the same, so that the next run replaces what a killed one
    left; the caller must have the lock of what it writes.
    """
    with _staged(path, data, staging, name) as temporary, translated("write", path):
        temporary.replace(path)
        sync(path.parent)


def write_described(
    path: Path, data: bytes | Iterable[bytes], description: Path, text: bytes
) -> None:
    """Replace `path` by `data`, and `description`, in the same directory, by `text`; after return
    they survive a power loss. A killed run may leave no description, but never that of another
    `path`; a full disk leaves both as they were.
    """
    folder = path.parent
    with _staged(path, data, folder) as first, _staged(description, text, folder) as second:
        with translated("write", description):
            if description.exists() and description.read_bytes() != text:
                description.unlink()
                sync(folder)
        with translated("write", path):
            first.replace(path)
            sync(folder)
        with translated("write", description):
            second.replace(description)
            sync(folder)


@contextmanager
def _staged(
    path: Path, data: bytes | Iterable[bytes], staging: Path, name: str | None = None
) -> Iterator[Path]:
    """A temporary file with `data`, on the disk. It is removed if it, or what is inside, fails."""
    temporary = staging / (name or f"{path.name}.part")
    try:
        with translated("write", path), new_file(temporary) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def new_file(path: Path) -> BinaryIO:
    """A new file at `path` to write. What is there is removed: it may be a link, or another name
    of a file that is elsewhere, and must not be written to."""
    try:
        return path.open("xb")
    except FileExistsError:
        path.unlink()
        return path.open("xb")


def is_there(path: Path) -> bool:
    """Whether something is at `path`. ResourceError where that cannot be told, as in a directory
    that may not be entered: `exists`, `is_dir` and `is_file` of Python 3.14 say False of that."""
    try:
        return path.exists() or bool(path.stat())
    except ValueError:  # no name that a file can have
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise io_error("read", path, error) from error


def check_writable(path: Path, option: str) -> None:
    """UsageError or ResourceError if no file can be written at `path`."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(
            f"{option} {path} cannot be written", "give a file in an existing directory"
        )
    if path.exists() and not path.is_file():  # a device, which would be replaced
        raise UsageError(f"{option} {path} is not a regular file", "give the name of a new file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written", _OTHER_PLACE)
    with translated("write", path), tempfile.TemporaryFile(dir=path.absolute().parent):
        pass


def check_directory(path: Path, option: str, apart: Iterable[Path] = ()) -> None:
    """UsageError unless files can be made in `path`, which need not exist yet, and which is not in
    one of the directories `apart`: these have a content that must stay as it is."""
    existing = path.absolute()
    while not existing.exists() and not existing.is_symlink():
        existing = existing.parent
    why = None
    if not existing.is_dir():
        why = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} cannot be written"
    else:
        inside = (one for one in apart if path.resolve().is_relative_to(one.resolve()))
        if (other := next(inside, None)) is not None:
            why = f"it is in {other}, to which nothing may be added"
    if why is not None:
        raise UsageError(f"{option} {path} cannot be used: {why}", "choose another directory")


def make_directory(path: Path) -> None:
    """Create a directory and its parents; they survive a power loss.

    Another run may create or remove it at the same time. Some file systems, /proc and stale
    mounts among them, say of every new name that it does not exist: tries are counted.
    """
    with translated("create directory", path):
        for attempt in range(MKDIR_ATTEMPTS):
            if _is_directory(path):
                return
            make_directory(path.parent)
            try:
                path.mkdir()
            except (FileExistsError, FileNotFoundError):
                if attempt == MKDIR_ATTEMPTS - 1:
                    raise
            try:
                _sync_readable(path.parent)
            except OSError:  # the next run must not find it and trust it
                with contextlib.suppress(OSError):
                    path.rmdir()
                raise


def _is_directory(path: Path) -> bool:
    """False if nothing is there. OutputError if something else is."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise OutputError(
                f"{path} is a broken link", "choose another path, or remove it"
            ) from None
        return False
    if not stat.S_ISDIR(mode):
        raise OutputError(f"{path} is a file", "choose another path, or remove it")
    return True


def remove(path: Path, but_held: bool = False) -> None:
    """Remove a file, a link or a whole directory, if there is one. `but_held`: on NFS a file that
    this process has open stays under another name, and so do its directories, until it is closed;
    then they can be removed by `remove_empty`."""
    with translated("remove", path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=_raise_but_held if but_held else None)
        else:
            path.unlink(missing_ok=True)


def _raise_but_held(call: object, path: str, info: Any) -> None:
    error = info[1]
    if call is not os.rmdir or error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
        raise error


def remove_empty(*directories: Path) -> None:
    """Remove these directories, the inner ones first, as far as nothing is in them."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()
