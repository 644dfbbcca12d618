"""docs/adding.md against additions of the past: all files that they touched are named there."""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.process

PAGE = (ROOT / "docs/adding.md").read_text(encoding="utf-8")
# Heading, what an addition is called in code, and where that is looked for.
OWN = (
    "src/ktconv/inspect/doctor.py",
    "src/ktconv/cli/doctor.py",
)  # what was added
TOO_WIDE = ("native/src/", "src/ktconv/", "tests/")
WALKS = {
    "an input encoding": (r"(?<!A)MXINT4|of_mxint4", ["src/ktconv", "native", "tests/helpers"]),
    "a weight format": (r"gint8|GINT8", ["src/ktconv", "native"]),
    "an ISA level": (r"neon|NEON", ["native/src", "native/include"]),
    "a subcommand": (r"[\":]doctor\"|^def doctor", ["src/ktconv", "docs"]),
    "a model family": (r"kolibri1|Kolibri1", ["src/ktconv", "tests"]),
}


def section(heading: str) -> str:
    return PAGE.split(f"\n## Adding {heading}\n")[1].split("\n## ")[0]


def named(heading: str) -> list[str]:
    """Files and folders of a section; a file that is named alone is beside the one before it."""
    found: list[str] = []
    for path in re.findall(r"`([\w./*-]+(?:\.\w+|/))`", section(heading)):
        folder = found[-1].rpartition("/")[0] if found else ""
        found += [path, f"{folder}/{path}"] if "/" not in path else [path]
    return found


def touched(pattern: str, places: list[str]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *places], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    this = "tests/test_adding.py"
    files = [path for path in listed if path.endswith((".py", ".c", ".h")) and path != this]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in files}
    return [path for path, text in texts.items() if re.search(pattern, text, re.MULTILINE)]


@pytest.mark.parametrize("heading", WALKS)
def test_every_file_of_an_earlier_addition_is_named(heading: str) -> None:
    files = touched(*WALKS[heading])
    if not files:
        pytest.skip("needs the repository")
    places = [*OWN, *(one for one in named(heading) if one not in TOO_WIDE)]
    assert len(files) >= 2
    for file in files:
        covered = any(file == one or (one.endswith("/") and file.startswith(one)) for one in places)
        assert covered, f"Adding {heading} does not name {file}"


def test_a_file_that_is_not_named_is_found() -> None:
    assert "src/ktconv/formats/table.py" in named("a weight format")
    assert "src/ktconv/source/elements.py" not in named("a weight format")
