"""Pointers of Git LFS: the short texts that a clone without it has in place of large files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from ktconv.errors import CheckpointError
from ktconv.system.stores import is_remote
from ktconv.system.units import format_size

POINTER_BYTES = 1024  # by its specification, a pointer has fewer
_START = b"version https://git-lfs"
_SIZE = re.compile(rb"^size ([0-9]{1,18})\r?$", re.MULTILINE)


class PointerError(CheckpointError):
    """A file is a pointer of Git LFS; what it stands for is not there."""


def refuse_pointer(path: Path, nbytes: int, take: Callable[[int], bytes]) -> None:
    """PointerError if the file `path` of `nbytes` bytes is a pointer. `take(n)` returns its first
    `n` bytes; it is called for short files only."""
    if not len(_START) <= nbytes < POINTER_BYTES:
        return
    text = take(nbytes)
    if not text.startswith(_START):
        return
    size = _SIZE.search(text)
    real = f"a file of {format_size(int(size[1]))}" if size else "the file"
    raise PointerError(
        f"{path} is a Git LFS pointer in place of {real}: the repository was cloned without "
        "git-lfs",
        "Run `git lfs pull` in the clone, or download the model again.",
    )


def refuse_pointer_at(path: Path) -> None:
    """`refuse_pointer` for a file that is read by its name; one that is no file, or not there, is
    left to who reads it."""
    with contextlib.suppress(OSError):
        if not is_remote(path) and path.is_file():  # to open a pipe is to take it from its reader
            with path.open("rb") as file:
                refuse_pointer(path, path.stat().st_size, file.read)
