"""Documentation names files, make targets and rooms that exist, and all rooms there are."""

from __future__ import annotations

import re

import pytest
from helpers.paths import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
MAKES = ["README.md", "CONTRIBUTING.md", ".github/workflows/ci.yml", ".ci/run"]
SUFFIXES = (".py", ".c", ".h")
# A path of the repository in backticks or in a link: a/b.c, a/b/, b.md.
_PATH = re.compile(r"`((?:src|native|tests|docs|benchmarks|\.ci)/[\w./-]*)`|\]\(([\w./-]+)\)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    for match in _PATH.finditer(text_of(page)):
        path = ROOT / match[1] if match[1] else (ROOT / page).parent / match[2]
        assert path.exists(), f"{page} names {match[1] or match[2]}"
        assert not (match[1] or "").endswith("/") or path.is_dir(), f"{page} names {match[1]}"


def rooms(directory: str) -> set[str]:
    """Folders with Python or C, at any depth."""
    root = ROOT / directory
    found = [path.relative_to(root) for path in root.rglob("*") if path.suffix in SUFFIXES]
    return {path.parts[0] for path in found if len(path.parts) > 1}


def test_the_map_names_every_room() -> None:
    page = text_of("docs/architecture.md")
    listed = set(re.findall(r"`src/ktconv/(\w+)/`", page))
    assert listed == rooms("src/ktconv")


def test_the_architecture_page_names_every_room_of_c() -> None:
    page = text_of("docs/architecture.md")
    assert set(re.findall(r"`native/src/(\w+)/`", page)) == rooms("native/src")


def test_the_picture_names_every_room() -> None:
    picture = text_of("docs/architecture.md").split("```")[1]
    words = set(re.findall(r"\w+", picture))
    assert rooms("src/ktconv") <= words


@pytest.mark.parametrize("page", MAKES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", text_of("Makefile"), re.MULTILINE))
    call = r"(?:`|^ *|run: )make (?:-j\d* )?([a-z][a-z0-9-]*)"
    named = set(re.findall(call, text_of(page), re.MULTILINE))
    assert named
    assert named <= targets


def test_hooks_run_tools_of_the_environment() -> None:
    tools = re.findall(r"entry: \.venv/bin/([\w-]+)", text_of(".pre-commit-config.yaml"))
    assert tools
    assert all(re.search(rf"^{tool}==", text_of("constraints.txt"), re.MULTILINE) for tool in tools)
