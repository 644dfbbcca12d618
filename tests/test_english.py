"""The English of pages, help texts and docstrings: phrases to avoid, and what they begin with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from helpers.paths import DOCS, ROOT

PAGES = [
    *sorted(DOCS.glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
]
SOURCE = ROOT / "src/ktconv"
MODULES = [*sorted(SOURCE.rglob("*.py")), *sorted(DOCS.glob("*.py"))]
# Text of outputs, whose bytes stay as they are.
KEPT = {SOURCE / "targets/encoded/config.py": "names, beside "}
# A phrase, and what to write in its place.
AVOID = {
    r"anew": "again, or re-quantize",
    r"beside": "next to, or besides",
    r"ma[kd]e up for": "GPTQ error compensation, or compensate",
    r"for ever": "forever, or without end",
    r"nobody knows|nothing knows": "unknown",
    r"so many|so much": "the number, or N of",
    r"squared errors count": "importance-weighted errors",
}
# What says nothing without the name above it.
OPENER = re.compile(
    r"(Of|Those|That|As|For|In|By|With|Without|Where|Beside|From|Its|What|Which|Why|How|This"
    r"|The same)\b"
)


def prose(path: Path) -> str:
    """A page, or the strings and docstrings of a module, without their code."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        strings = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        text = "\n".join(node.value for node in strings if isinstance(node.value, str))
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_phrases_to_avoid(path: Path) -> None:
    text = " ".join(prose(path).split()).replace(KEPT.get(path, ""), "")
    for phrase, better in AVOID.items():
        found = re.search(rf"(.{{0,40}}\b(?:{phrase})\b.{{0,40}})", text, re.IGNORECASE)
        assert not found, f"{found[1]}: write {better}" if found else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_say_something_by_themselves(path: Path) -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            name = getattr(node, "name", path.name)
            assert not OPENER.match(docstring), f"{name}: {docstring.splitlines()[0]}"
