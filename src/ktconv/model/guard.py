"""While transformers loads a checkpoint, none of its files runs and no question is asked.

The options that `ktconv.model.load` passes are what keeps code out. This is the second lock: an
audit hook, which Python calls before it runs, imports or opens anything, whichever library asks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Files that hold code, or objects whose reading can run code (pickles).
_SUFFIXES = (".py", ".pyc", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PREFIX = Path(sys.prefix).absolute()  # of the interpreter, which may be inside a checkpoint
_STARTING = ("os.exec", "os.posix_spawn", "os.system", "subprocess.Popen")


class RefusedError(RuntimeError):
    """A file of a checkpoint was about to run, or a question to be asked."""


class _Guard:
    """Directories whose files must not run just now; in all threads, since loading uses several."""

    def __init__(self) -> None:
        self.directories: list[Path] = []
        self._installed = False

    def install(self) -> None:
        """Once per process: hooks cannot be removed."""
        if not self._installed:
            directories = self.directories

            # Called for each id() and attribute set, of which copying a model has thousands: a
            # function that finds what it needs in itself costs a third of a method.
            def hook(event: str, arguments: tuple[Any, ...]) -> None:
                if directories:
                    self._on_event(event, arguments)

            sys.addaudithook(hook)
            self._installed = True

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "builtins.input":
            raise RefusedError("it asks whether to run code")
        for path in _paths_of(event, arguments):
            if path and self._guards(_absolute(path)):
                raise RefusedError(f"{path} would run")

    def _guards(self, path: Path) -> bool:
        # Source that is no file has a name like <string>, relative to nothing.
        inside = any(
            directory in path.parents
            and not (directory in _PREFIX.parents and _PREFIX in path.parents)
            for directory in self.directories
        )
        return inside and os.access(path, os.F_OK)


_guard = _Guard()


@contextmanager
def no_code_of(*directories: str | Path) -> Iterator[None]:
    """Meanwhile RefusedError comes out of whatever would run, import or start a file in
    `directories`, open one whose name ends as those of code and pickles do, or ask a question on
    stdin."""
    _guard.install()
    mine = {
        spelling for path in directories for spelling in (_absolute(path), Path(path).resolve())
    }
    _guard.directories += mine
    try:
        yield
    finally:
        for directory in mine:
            _guard.directories.remove(directory)


def _absolute(path: str | Path) -> Path:
    """Make a path absolute without resolving links: files of a hub snapshot are links to files
    elsewhere."""
    with suppress(FileNotFoundError):  # the working directory is gone
        path = Path(path).absolute()
    return Path(os.path.normpath(path))


def _paths_of(event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    """Files that an event of Python's audit table runs, or reads as something that can run."""
    if event == "exec":
        yield _text(getattr(arguments[0], "co_filename", None))
    elif event == "import":
        yield _text(arguments[1])  # of an extension module, else None
    elif event == "ctypes.dlopen":
        yield _text(arguments[0])
    elif event == "open":
        path = _text(arguments[0])
        yield path if path.endswith(_SUFFIXES) else ""
    elif event in _STARTING:
        words = [arguments[0], *(arguments[1] if len(arguments) > 1 else ())]
        yield from (part for word in words for part in _text(word).split())


def _text(path: Any) -> str:
    """A path as text; empty for a file descriptor or nothing."""
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
