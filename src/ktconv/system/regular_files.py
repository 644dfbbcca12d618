"""Opening files of unknown origin: regular files only, small ones of bounded size.

A named pipe would wait forever, a device never ends, and a link in a downloaded model can lead to
any file of this machine. What is opened is checked by its descriptor, so that a file which is
exchanged in between is noticed.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ktconv.errors import CheckpointError, ResourceError, UsageError
from ktconv.system.files import opened_fd
from ktconv.system.pointers import POINTER_BYTES, refuse_pointer
from ktconv.system.stores import RemotePath
from ktconv.system.units import format_size

# Far beyond any config.json; parsed JSON takes several times its size.
MAX_CONFIG_BYTES = 64 << 20
# Of any other file beside the weights. A manifest of a million tensors has 250 MB.
MAX_SMALL_BYTES = 1 << 30

_DOWNLOAD = "Download it again, or copy it there."
# In the hub's cache, the links of a directory in the one lead to files of the other.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
_COPIED = (
    "It was copied from a snapshot in the Hugging Face cache without the files that its links lead "
    "to: copy the snapshot again with `cp -rL`, or download the model."
)
_CHUNK_BYTES = 1 << 20


class MissingFileError(CheckpointError):
    """There is nothing under that name, not even a link."""


def open_regular(path: Path) -> int:
    """A descriptor for reading `path`, a regular file; links are followed.

    Raises CheckpointError for anything else, for a broken link and for a pointer of Git LFS,
    MissingFileError where nothing is, ResourceError where the system refuses.
    """
    try:
        _refuse_irregular(path, path.stat())  # before opening: some devices act on that alone
        # Without O_NONBLOCK the open of a pipe that is put there now waits for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unopened(path, error) from None
    try:
        status = os.fstat(descriptor)
        _refuse_irregular(path, status)
        _refuse_pointer(path, descriptor, status.st_size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened_regular(path: Path) -> Iterator[int]:
    """`open_regular`, closed at the end."""
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_small(directory: Path, name: str | Path, limit: int = MAX_SMALL_BYTES) -> Iterator[int]:
    """A descriptor of a file next to the weights of `directory`, of at most `limit` bytes.

    Links may lead inside of `directory` and, from a snapshot in the hub's cache, to the blobs of
    the same repository. Raises as `open_regular`; CheckpointError for other links and larger files.
    """
    path = directory / name
    if isinstance(path, RemotePath):
        with _opened_copy(path, limit) as descriptor:
            yield descriptor
        return
    with opened_regular(path) as descriptor:
        _refuse_outside(directory, path, descriptor)
        _refuse_large(path, os.fstat(descriptor).st_size, limit)
        yield descriptor


@contextmanager
def _opened_copy(path: RemotePath, limit: int) -> Iterator[int]:
    """The copy on this machine of a remote file; errors have its URL."""
    _refuse_large(path, path.store.nbytes(path), limit)
    with opened_fd(path.store.local(path), os.O_RDONLY) as descriptor:
        _refuse_pointer(path, descriptor, os.fstat(descriptor).st_size)
        yield descriptor


def _refuse_pointer(path: Path, descriptor: int, size: int) -> None:
    refuse_pointer(path, size, lambda count: _read(path, descriptor, 0, count))


def _refuse_large(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise _too_large(path, f"has {format_size(size)}", limit)


def check_small(directory: Path, name: str | Path, limit: int | None = MAX_SMALL_BYTES) -> None:
    """Raises as `opened_small`; a remote file is fetched for that only where it is short enough for
    a pointer of Git LFS. `limit` None: a file of any size."""
    path = directory / name
    if not isinstance(path, RemotePath) or path.store.nbytes(path) < POINTER_BYTES:
        with opened_small(directory, name, sys.maxsize if limit is None else limit):
            pass


def read_chunks(path: Path, descriptor: int, limit: int = MAX_SMALL_BYTES) -> Iterator[bytes]:
    """The bytes of an opened file, a MiB at a time; `path` is for errors."""
    done = 0
    while piece := _read(path, descriptor, done):
        done += len(piece)
        if done > limit:  # it grows while it is read
            raise _too_large(path, "grows while it is read", limit)
        yield piece


def read_small(directory: Path, name: str | Path, limit: int = MAX_SMALL_BYTES) -> bytes:
    """All bytes of a file next to the weights; raises as `opened_small`."""
    with opened_small(directory, name, limit) as descriptor:
        return b"".join(read_chunks(directory / name, descriptor, limit))


def read_given(path: Path, what: str, hint: str, limit: int = MAX_CONFIG_BYTES) -> bytes:
    """All bytes of FILE of the option `what`, a file or a pipe, of at most `limit` bytes. Raises
    UsageError where no file is, for a device and for a larger file, PointerError for a pointer of
    Git LFS, ResourceError where the system refuses."""
    refuse_device(path, what)
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{what} {path} does not exist", hint) from None
    except IsADirectoryError:
        raise UsageError(f"{what} {path} is a directory", hint) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{what} {path} is a link that leads in a circle", hint) from None
        raise unreadable(path, error) from error
    refuse_pointer(path, len(data), lambda count: data[:count])
    if len(data) > limit:
        raise UsageError(
            f"{what} {path} is larger than {format_size(limit)}, the limit for such a file", hint
        )
    return data


def refuse_device(path: Path, what: str) -> None:
    """UsageError if `path`, a file to read that `what` names ("--text"), is a device, such as
    /dev/zero: some have no end. Files and pipes, also as of `<(command)`, are no devices; what is
    not there is left to who reads it."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise UsageError(f"{what} {path} is a device", "give a file")


def unreadable(path: Path, error: OSError) -> ResourceError:
    """The error for a file that the system does not let us read."""
    reason = error.strerror or str(error)
    hint = "Check its permissions and the disk."
    if error.errno == errno.EMFILE:
        hint = "Raise the limit of open files (ulimit -n)."
    return ResourceError(f"{path} cannot be read: {reason}", hint)


def _read(path: Path, descriptor: int, offset: int, count: int = _CHUNK_BYTES) -> bytes:
    try:
        return os.pread(descriptor, count, offset)
    except OSError as error:
        raise unreadable(path, error) from error


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{path} is a directory, not a regular file", "Remove or rename it.")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path} is not a regular file", "Remove it, or replace it by the file itself."
        )


def broken_link(path: Path) -> CheckpointError | None:
    """The error for a link that leads to nothing; None where `path` is none."""
    if not path.is_symlink() or path.exists():
        return None
    return CheckpointError(f"{path} is a broken link to {path.readlink()}", link_hint(path))


def link_hint(path: Path) -> str:
    """The way out for a link that leads to nothing."""
    copied = _BLOBS in path.readlink().parts and _SNAPSHOTS not in path.absolute().parts
    return _COPIED if copied else _DOWNLOAD


def _unopened(path: Path, error: OSError) -> CheckpointError | ResourceError:
    if error.errno == errno.ENAMETOOLONG:
        return MissingFileError(f"{path} does not exist: its name is too long", _DOWNLOAD)
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        if link := broken_link(path):
            return link
        return MissingFileError(f"{path} does not exist", _DOWNLOAD)
    return unreadable(path, error)


def _refuse_outside(directory: Path, path: Path, descriptor: int) -> None:
    """Refuse a file that a link leads to from outside of `directory`."""
    root, target = (Path(os.path.realpath(one)) for one in (directory, path))
    if not any(target.is_relative_to(allowed) for allowed in _allowed(root)):
        raise CheckpointError(
            f"{path} is a link to {target}, which is outside of {directory}",
            "Replace the link by a copy, if that file belongs to the model.",
        )
    try:
        same = os.path.samestat(os.fstat(descriptor), target.stat())
    except FileNotFoundError:
        raise MissingFileError(f"{path} was removed while it was opened", _DOWNLOAD) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if not same:
        raise CheckpointError(f"{path} was replaced while it was opened", "Try again.")


def _allowed(root: Path) -> Iterator[Path]:
    """Directories in which files of `root` may be: there, or in the blobs that hub snapshots link
    to."""
    yield root
    if root.parent.name == _SNAPSHOTS:
        yield root.parent.parent / _BLOBS


def _too_large(path: Path, what: str, limit: int) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}, more than the limit of {format_size(limit)} for such a file",
        "Remove it, or replace it by the right file.",
    )
