"""A text for a model to read: a file, or the one that ships with ktconv."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from io import TextIOWrapper
from itertools import chain
from pathlib import Path

from ktconv.errors import UsageError
from ktconv.system.pointers import refuse_pointer_at
from ktconv.system.regular_files import refuse_device

_PIECE = 1 << 20  # characters that are in memory at a time
_HINT = "give a UTF-8 text file of a few pages"


def text_pieces(path: Path | None, option: str = "--text") -> Iterator[str]:
    """A text file's lines, about a million characters at a time; the text that ships for None.
    `option` is what errors call it.

    Raises UsageError for a device, and a file that cannot be read or is no UTF-8 text, PointerError
    for a pointer of Git LFS.
    """
    if path is None:
        yield resources.files("ktconv.model").joinpath("sample.txt").read_text(encoding="utf-8")
        return
    refuse_device(path, option)
    refuse_pointer_at(path)
    try:
        with path.open("rb") as bytes_of, TextIOWrapper(bytes_of, "utf-8") as file:
            try:
                while piece := file.read(_PIECE):
                    yield piece + file.readline(_PIECE)
            except UnicodeDecodeError as error:
                at = bytes_of.tell() - len(error.object) + error.start
                why = f"it is not UTF-8 text at byte {at}"
                raise UsageError(f"{option} {path} cannot be read: {why}", _HINT) from error
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror}", _HINT) from error


def open_text(path: Path | None, option: str = "--text") -> tuple[Iterator[str], str]:
    """`text_pieces`, of which the first was read, and the name of the text in reports.

    Raises UsageError for a text that cannot be read or is empty, before a model is loaded.
    """
    pieces = text_pieces(path, option)
    first = next(pieces, "")
    if not first.strip():
        raise UsageError(f"{option} {path} is empty", _HINT)
    return chain([first], pieces), path.name if path else "the built-in sample"


def read_text(path: Path | None, option: str = "--text") -> tuple[str, str]:
    """The whole text and its name; raises as `open_text`."""
    pieces, name = open_text(path, option)
    return "".join(pieces), name
