"""The list of `--from-list`: a line for each model, checked as a whole before any work starts.

# MODEL OUTPUT [options of quantize-cpu]; quotes as in a shell
Qwen/Qwen3-30B-A3B      /srv/qwen3-int4
deepseek-ai/DeepSeek-V3 /srv/dsv3-int8    --method int8 --numa 2
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.source.locate import hub_model
from ktconv.source.remote.urls import is_url, shown_model
from ktconv.system.regular_files import read_given
from ktconv.system.units import counted

MAX_LIST_BYTES = 4 << 20
MAX_LINE = 64 << 10  # characters; shlex takes time that grows with their square
# They belong to the list, and not to one of its lines.
OF_THE_LIST = ("--from-list", "--at-once", "--json", "--progress", "--help", "-h")


class Entry(Struct, frozen=True):
    """A line of the list."""

    line: int
    model: str
    output: Path
    words: tuple[str, ...]  # options

    @property
    def name(self) -> str:
        return f"line {self.line}"

    @property
    def shown(self) -> str:
        """MODEL for users: without secrets."""
        return shown_model(self.model)


Check = Callable[[Sequence[str]], str | None]  # words of a command -> what is wrong with them


def read_list(path: Path, check: Check) -> list[Entry]:
    """The entries of a list. UsageError names the file and the line of what cannot be: quotes
    without an end, a line without OUTPUT, options that `check` refuses, a MODEL that is nowhere,
    an OUTPUT that two lines share, or that is inside of another or of a source."""
    data = read_given(path, "--from-list", _LINES, MAX_LIST_BYTES)
    text = data.decode(errors="replace")
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE:
            why = f"it has {counted(len(line), 'character')}; the limit is {MAX_LINE:,}"
            raise _wrong(path, number, why)
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise _wrong(path, number, f"{error}") from None
        if words:
            entries.append(_entry(path, number, words, check))
    if not entries:
        raise UsageError(f"{path} names no models", _LINES)
    _check_places(path, entries)
    return entries


_LINES = "write a line MODEL OUTPUT for each"
_FORM = "write MODEL OUTPUT [options]"


def _wrong(path: Path, line: int, why: str, hint: str = _FORM) -> UsageError:
    return UsageError(f"line {line} of {path}: {why}", hint)


def _entry(path: Path, number: int, words: Sequence[str], check: Check) -> Entry:
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise _wrong(path, number, "it does not begin with MODEL and OUTPUT")
    model, output, *options = words
    for word in options:
        if word.partition("=")[0] in OF_THE_LIST:
            raise _wrong(path, number, f"{word} cannot be given for one model")
    if not Path(model).exists() and not is_url(model) and hub_model(model) is None:
        raise _wrong(
            path, number, f"{model} does not exist", "check the path, or give org/name or a URL"
        )
    if (why := check(words)) is not None:
        raise _wrong(path, number, why)
    return Entry(number, model, Path(output), tuple(options))


def _check_places(path: Path, entries: Sequence[Entry]) -> None:
    places: dict[str, Entry] = {}
    for entry in entries:
        place = os.path.realpath(entry.output)
        if (other := places.get(place)) is not None:
            raise _wrong(path, entry.line, f"line {other.line} has the same OUTPUT {entry.output}")
        places[place] = entry
    for place, entry in places.items():
        for parent in Path(place).parents:
            if (other := places.get(str(parent))) is not None:
                why = f"{entry.output} is inside of {other.output}, the OUTPUT of line {other.line}"
                raise _wrong(path, entry.line, why)
    sources = {os.path.realpath(one.model): one for one in entries if Path(one.model).is_dir()}
    for place, entry in places.items():
        for one in (place, *map(str, Path(place).parents)):
            if (other := sources.get(one)) is not None:
                why = f"{entry.output} is inside of {other.model}, the MODEL of line {other.line}"
                raise _wrong(path, entry.line, why)
