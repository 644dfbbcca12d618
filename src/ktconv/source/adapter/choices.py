"""The adapters that an option names: directories with weights, DIR or DIR:0.5."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ktconv.errors import UsageError


class Choice(NamedTuple):
    """An adapter, and the factor by which all that it adds is multiplied."""

    directory: Path
    weight: float

    def __str__(self) -> str:
        return str(self.directory) if self.weight == 1 else f"{self.directory}:{self.weight:g}"


def choices_of(texts: Iterable[str]) -> list[Choice]:
    """Adapters in the order in which they are named. UsageError for a weight that is not a number
    other than 0, and for a directory that is named twice."""
    found: dict[str, Choice] = {}
    for text in texts:
        one = _choice(text)
        place = os.path.realpath(one.directory)
        if place in found:
            raise UsageError(
                f"--adapter {one.directory} is given twice", "give it once, as DIR:WEIGHT"
            )
        found[place] = one
    return list(found.values())


def absolute(texts: Iterable[str]) -> tuple[str, ...]:
    """Name adapters by absolute paths; weights that cannot be read stay for `choices_of`."""
    found = []
    for text in texts:
        directory, weight = _split(text)
        found.append(f"{Path(directory).absolute()}{weight}")
    return tuple(found)


def _split(text: str) -> tuple[str, str]:
    """Directory, and ":0.5" or nothing. A directory may have a colon in its own name."""
    head, colon, weight = text.rpartition(":")
    if not colon or not head or "/" in weight or Path(text).exists():
        return text, ""
    return head, colon + weight


def _choice(text: str) -> Choice:
    directory, given = _split(text)
    if not given:
        return Choice(Path(directory), 1.0)
    try:
        weight = float(given[1:])
    except ValueError:
        weight = math.nan
    if not weight or not math.isfinite(weight) or abs(weight) > 1e6:
        raise UsageError(
            f"--adapter {text}: the weight {given[1:]!r:.40} is not a number from -1e6 to 1e6 "
            "other than 0",
            "write --adapter DIR:0.5, or DIR alone for a weight of 1",
        )
    return Choice(Path(directory), weight)
