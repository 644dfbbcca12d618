"""Texts for calibration and for evaluation, which never overlap, cut from one file or from two."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

WINDOW = 512  # tokens
_BLOCK = 2000  # bytes of a block of lines, at least
_SHARE = 0.5  # of the calibration text's blocks in a subset


@dataclass(frozen=True)
class Text:
    """Some text, and where it is from: a file's name with a range of bytes."""

    name: str
    content: str


def cut_in_halves(file: Path) -> tuple[Text, Text]:
    """A UTF-8 file's first and second half, cut at the end of a line.

    Raises ValueError for a file without a line end in its first half or nothing behind it.
    """
    data = file.read_bytes()
    middle = data.rfind(b"\n", 0, len(data) // 2) + 1
    if not middle or not data[middle:].strip():
        raise ValueError(f"{file} cannot be cut into two texts at the end of a line")
    return (
        Text(f"{file.name}[0:{middle}]", data[:middle].decode()),
        Text(f"{file.name}[{middle}:{len(data)}]", data[middle:].decode()),
    )


def cut_in_blocks(file: Path) -> tuple[Text, Text]:
    """A UTF-8 file's even and odd blocks of lines, so that both are texts of the same kind.

    Raises ValueError for a file of a single block.
    """
    blocks = _blocks(file.read_text(encoding="utf-8"))
    if len(blocks) < 2:
        raise ValueError(f"{file} is too short to be cut into alternating blocks of lines")
    return (
        Text(f"{file.name}, even blocks", "".join(blocks[::2])),
        Text(f"{file.name}, odd blocks", "".join(blocks[1::2])),
    )


def subset(text: Text, seed: int) -> Text:
    """Half of a text's blocks of lines, chosen by the seed, in their order."""
    blocks = _blocks(text.content)
    chosen = sorted(random.Random(seed).sample(range(len(blocks)), round(_SHARE * len(blocks))))
    return Text(f"{text.name} subset {seed}", "".join(blocks[index] for index in chosen))


def _blocks(content: str) -> list[str]:
    """Runs of whole lines of about _BLOCK bytes; together they are the content."""
    blocks, block, size = [], [], 0
    for line in content.splitlines(keepends=True):
        block.append(line)
        size += len(line.encode())
        if size >= _BLOCK:
            blocks.append("".join(block))
            block, size = [], 0
    return [*blocks, "".join(block)] if block else blocks
