"""The English of pages, help texts and docstrings: phrases to avoid, and what they begin with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from helpers.parsed import nodes
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
    if path.suffix == ".md":
        text = path.read_text("utf-8")
    else:
        strings = (node for node in nodes(path) if isinstance(node, ast.Constant))
        text = "\n".join(node.value for node in strings if isinstance(node.value, str))
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def phrases(text: str) -> list[str]:
    """What to write in place of the phrases to avoid."""
    return [
        f"{text[max(0, found.start() - 40) : found.end() + 40]}: write {better}"
        for phrase, better in AVOID.items()
        for found in re.finditer(rf"\b(?:{phrase})\b", text, re.IGNORECASE)
    ]


def openers(module: Iterable[ast.AST]) -> list[str]:
    """Docstrings that say nothing by themselves."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named = ((node, ast.get_docstring(node)) for node in module if isinstance(node, kinds))
    return [
        f"{getattr(node, 'name', 'module')}: {docstring.splitlines()[0]}"
        for node, docstring in named
        if docstring and OPENER.match(docstring)
    ]


def test_phrases_to_avoid() -> None:
    assert phrases("told anew for ever") == [
        "told anew for ever: write again, or re-quantize",
        "told anew for ever: write forever, or without end",
    ]
    texts = {path: " ".join(prose(path).split()) for path in (*PAGES, *MODULES)}
    assert all(texts.values())
    assert [
        f"{path.relative_to(ROOT)}: {one}"
        for path, text in texts.items()
        for one in phrases(text.replace(KEPT.get(path, ""), ""))
    ] == []


def test_docstrings_say_something_by_themselves() -> None:
    bad = ast.walk(ast.parse('def f():\n    """Of those, some."""'))
    assert openers(bad) == ["f: Of those, some."]
    assert [
        f"{path.relative_to(ROOT)}: {one}" for path in MODULES for one in openers(nodes(path))
    ] == []
