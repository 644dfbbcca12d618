"""Every message that docs/troubleshooting.md explains is one that the program can print."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from helpers.parsed import nodes
from helpers.paths import DOCS, ROOT

pytestmark = pytest.mark.slow

TEXT = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    " ".join(one.replace("\\", "").split())
    for one in re.findall(r"\*\*(.+?)\*\*(?!\*)", TEXT, re.DOTALL)
]
LEAST = 0.35  # of a message: what a string says itself, without what is put into it


@cache
def templates() -> list[tuple[tuple[str, ...], int]]:
    """Every string of the program and of the C library's reasons as the parts between which
    something is put, with the number of their letters."""
    found = set()
    for path in (ROOT / "src/ktconv").rglob("*.py"):
        found |= {_parts(node) for node in nodes(path) if isinstance(node, ast.expr)}
    status = (ROOT / "native/src/status.c").read_text(encoding="utf-8")
    found |= {(text,) for text in re.findall(r'return "([^"]+)"', status)}
    return [(parts, sum(map(len, parts))) for parts in found]


def _parts(node: ast.expr) -> tuple[str, ...]:
    """The constant parts of a string, between which something is put."""
    if isinstance(node, ast.Constant):
        return (node.value,) if isinstance(node.value, str) else ()
    if not isinstance(node, ast.JoinedStr):
        return ()
    parts = [""]
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts[-1] += str(value.value)
        else:
            parts.append("")
    parts[-1] = parts[-1].rstrip(".")
    return tuple(parts)


def explained(message: str) -> bool:
    return any(
        re.fullmatch(".*?".join(map(re.escape, parts)), message, re.DOTALL)
        for parts, own in templates()
        if LEAST * len(message) <= own <= len(message) and all(one in message for one in parts)
    )


@pytest.mark.parametrize("message", MESSAGES)
def test_the_program_can_say_it(message: str) -> None:
    assert explained(message), f"no string of the program: {message}"


def test_there_are_enough_and_none_twice() -> None:
    assert len(MESSAGES) >= 40
    assert len(set(MESSAGES)) == len(MESSAGES)


def test_a_message_that_is_not_there_is_found() -> None:
    assert not explained("the moon is in the wrong phase for this conversion")
    assert not explained("OUTPUT has 120.0 GB free, but 340.1 GB are wanted")
