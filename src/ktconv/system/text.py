"""Strings from files and paths as text for terminals, web pages and JSON documents."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Notify = Callable[[str], None]  # takes a line that a user should read

# What moves the cursor, changes colours, reorders a line, or cannot be seen; and halves of
# surrogate pairs, which UTF-8 cannot encode.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\uffff\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
_SURROGATES = re.compile("[\ud800-\udfff]")


def silent(_: str) -> None:
    """A `Notify` that shows nothing."""


def printable(text: str, keep: str = "") -> str:
    """`text` as one line without control characters, line breaks, or marks that reorder it.

    They are written as \\u001b or \\U000e0001, and bytes of a file name that are not text as
    \\xff. Characters of `keep` stay.
    """
    return _UNSEEN.sub(lambda found: found[0] if found[0] in keep else _escaped(found), text)


def path_text(path: str | Path) -> str:
    """A path of the system as valid Unicode, the same in every locale: its bytes as UTF-8, those
    that are not UTF-8 as \\xff. Of a source that is not on this machine, its URL."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def path_of(text: str) -> str:
    """The path that `text` of a UTF-8 file means to the system, the same in every locale."""
    return os.fsdecode(text.encode())


def valid_unicode(value: Any) -> Any:
    """A JSON-ready value with `\\xff` or `\\ud800` in place of halves of surrogate pairs."""
    if isinstance(value, str):
        return _SURROGATES.sub(_escaped, value)
    if isinstance(value, Mapping):
        return {valid_unicode(name): valid_unicode(inner) for name, inner in value.items()}
    return [valid_unicode(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def first_few(items: Sequence[object], most: int = 3, between: str = ", ") -> str:
    """The first items and how many more there are: "a, b, c and 4 more"."""
    more = len(items) - most
    last = f"{between.rstrip(', ')} and {more} more" if more > 0 else ""
    return between.join(map(str, items[:most])) + last


def table_lines(rows: Iterable[Sequence[str]], left: Container[int] = ()) -> Iterator[str]:
    """Rows of as many cells each as lines: columns as wide as their widest cell, two spaces apart.
    Columns with a number in `left` are aligned to the left, others to the right."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python marks byte 0x80 + n of an undecodable name
        return f"\\x{code - 0xDC00:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
