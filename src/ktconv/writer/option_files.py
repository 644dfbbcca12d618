"""Files and directories that options name to be written: where they may be, what they may replace.

No option writes into a model or an output of ktconv, nor over a file that it has not written
itself: the rules are those of the place that a link leads to. Every option of a command that names
a file or directory to write is checked here, before any work and again when it is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from ktconv.errors import DiskFullError, KtconvError, ResourceError, UsageError
from ktconv.source.config import CONFIG_NAME
from ktconv.system.files import check_directory, check_writable, write_durably
from ktconv.writer.journal import STATE_DIRECTORY
from ktconv.writer.manifest import MANIFEST
from ktconv.writer.metadata import INDEX
from ktconv.writer.staging import staged_name

ATTEMPT = "ktconv"  # of staged names: FILE.ktconv.part
_ELSEWHERE = "choose a place outside of models and outputs"
_OTHER_DISK = "free some space, or name a file on another disk, then run the same command again"
_ADAPTER = "adapter_config.json"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".kt")
_HUB_CACHE = "models--"  # begins the names of directories of models in the cache of the hub


class WrittenFile(Struct, frozen=True):
    """A file that `option` names to be written. `is_one` tells of an existing file whether it is
    `what`, as this option writes it; it may raise KtconvError, OSError or ValueError instead."""

    path: Path
    option: str
    what: str  # "a set of experts that ktconv wrote"
    is_one: Callable[[Path], bool]

    @property
    def place(self) -> Path:
        """Place of the file, now or later, behind all links."""
        return Path(os.path.realpath(self.path))

    def check(self, apart: Iterable[str | Path] = ()) -> None:
        """UsageError or ResourceError if it cannot be written, is in a model, an output or a
        directory of `apart`, is one of the files of `apart`, or would replace a file that is not
        one of its own."""
        check_writable(self.path, self.option)
        named = Path(os.path.realpath(self.path.absolute().parent))
        for parent in dict.fromkeys((named, self.place.parent)):
            _check_outside(self.option, self.path, parent, apart)
        for other in apart:
            if Path(other).is_file() and self.path.exists() and self.path.samefile(other):
                raise UsageError(
                    f"{self.option} {self.path} is a file that this command reads",
                    "give the name of a new file",
                )
        if self.path.exists() and not self._is_own():
            raise UsageError(
                f"{self.option} {self.path} exists, and is not {self.what}",
                "give the name of a new file, or remove this one",
            )

    def _is_own(self) -> bool:
        try:
            return self.is_one(self.path)
        except (KtconvError, OSError, ValueError):
            return False

    def write(self, data: bytes | Iterable[bytes]) -> None:
        """Replace it in one step, if `check` still allows it. ResourceError if the disk is full:
        what commands say of that, as of layers that are kept, is about their output."""
        self.check()
        place = self.place
        try:
            write_durably(place, data, place.parent, staged_name(place.name, ATTEMPT))
        except DiskFullError as error:
            raise ResourceError(str(error), _OTHER_DISK) from error


def check_written(files: Sequence[WrittenFile | None], apart: Iterable[str | Path | None]) -> None:
    """`WrittenFile.check` of those that are given; UsageError if two of them are one file. `apart`:
    what the command reads and converts into; names of models that are not here are left out."""
    given, apart = [file for file in files if file is not None], list(apart)
    others = list(_here(apart))
    for number, file in enumerate(given):
        file.check(others)
        for path in apart:
            if path is not None and file.place == Path(os.path.realpath(path)):
                raise UsageError(
                    f"{file.option} {file.path} is a name that the command itself writes to",
                    "give the name of a new file",
                )
        for other in given[:number]:
            if file.place == other.place:
                raise UsageError(
                    f"{other.option} and {file.option} are both {file.path}",
                    "give each a file of its own",
                )


def check_written_directory(path: Path, option: str, apart: Iterable[str | Path | None]) -> None:
    """UsageError unless files can be made in `path`, which need not exist yet, outside of models,
    outputs and `apart`."""
    check_directory(path, option, _here(apart))
    _check_outside(option, path, Path(os.path.realpath(path)), ())


def is_output(directory: Path) -> bool:
    """Whether ktconv has written there, or does now."""
    return any(os.path.lexists(directory / name) for name in (MANIFEST, STATE_DIRECTORY))


def _here(paths: Iterable[str | Path | None]) -> Iterator[Path]:
    for path in paths:
        if path is not None and os.path.lexists(path):
            yield Path(path)


def _check_outside(option: str, path: Path, place: Path, apart: Iterable[str | Path]) -> None:
    """UsageError if directory `place` is one of those that nothing may be added to."""
    for other in apart:
        if Path(other).is_dir() and place.is_relative_to(os.path.realpath(other)):
            raise _inside(option, path, str(other))
    for directory in (place, *place.parents):
        if (why := _model_in(directory)) is not None:
            raise _inside(option, path, f"{directory}, {why}")


def _inside(option: str, path: Path, what: str) -> UsageError:
    return UsageError(f"{option} {path} is in {what}, to which nothing may be added", _ELSEWHERE)


def _model_in(directory: Path) -> str | None:
    """Reason why files of a directory belong together; None if nothing says so."""
    if directory.name.startswith(_HUB_CACHE):
        return "a model in the cache of the hub"
    if is_output(directory):
        return "an output of ktconv"
    if any(os.path.lexists(directory / name) for name in (INDEX, _ADAPTER)):
        return "a model"
    if os.path.lexists(directory / CONFIG_NAME):
        with contextlib.suppress(OSError), os.scandir(directory) as entries:  # not readable
            if any(entry.name.endswith(_WEIGHTS) for entry in entries):
                return "a model"
    return None
