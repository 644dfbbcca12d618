"""Side files of two conversions: config, tokenizer, templates, code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ktconv.checkpoint.side_files import is_legal, list_side_files
from ktconv.errors import CheckpointError
from ktconv.system.regular_files import read_small
from ktconv.verify.compare.words import counted
from ktconv.verify.side_content import content_differences


@dataclass(slots=True)
class SideFiles:
    """Differences and notes are whole sentences."""

    compared: int = 0
    same_bytes: bool = True
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_side_files(a: Path, b: Path) -> SideFiles:
    """Compares all side files. An output without any, as other tools write it, is not different."""
    found, names = SideFiles(), (set(list_side_files(a)), set(list_side_files(b)))
    if not names[0] or not names[1]:
        if names[0] or names[1]:
            here, there = ("A", "B") if names[0] else ("B", "A")
            count = counted(len(names[0] or names[1]), "file")
            found.notes.append(f"Only {here} has side files ({count}), {there} none.")
        return found
    for side, extra in (("A", names[0] - names[1]), ("B", names[1] - names[0])):
        for name in sorted(extra):
            legal = is_legal(name)
            (found.notes if legal else found.differences).append(f"Only {side} has {name}.")
            found.same_bytes = False
    for name in sorted(names[0] & names[1]):
        _compare(found, name, a, b)
    return found


def _compare(found: SideFiles, name: Path, a: Path, b: Path) -> None:
    try:
        here, there = (read_small(directory, name) for directory in (a, b))
    except CheckpointError as error:
        found.differences.append(f"{name} cannot be compared: {error}.")
        return
    found.compared += 1
    if here == there:
        return
    found.same_bytes = False
    differs = list(_differences(name, here, there))
    found.differences += [f"{name}: {one}." for one in differs]
    if not differs:
        same = (
            "its text differs" if is_legal(name) else "written differently, but it means the same"
        )
        found.notes.append(f"{name}: {same}.")


def _differences(name: Path, here: bytes, there: bytes) -> Iterator[str]:
    """Differences in content; of unknown files, which were copied from the model, in bytes."""
    known = content_differences(name, here, there, "in B")
    if known is not None:
        yield from known
    elif not is_legal(name):
        yield "its bytes differ"
