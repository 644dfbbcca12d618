"""The examples of docs/runtime.md and of the README."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert
from helpers.paths import EXAMPLE, ROOT

PAGE = "docs/runtime.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a MODEL and its OUTPUT."""
    path = tmp_path_factory.mktemp("page")
    shutil.copytree(EXAMPLE, path / "MODEL")
    convert(path / "MODEL", path / "OUTPUT", method="int4")
    return path


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks continue one another; what they print is in their comments."""
    monkeypatch.chdir(folder)
    known: dict[str, Any] = {}
    found = blocks(PAGE)
    assert len(found) == 6
    for block in found:
        exec(block, known)
        printed = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == printed
    assert known["y"].shape == (5, known["layer"].hidden)


def test_the_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    block = next(block for block in blocks("README.md") if "ktconv.runtime" in block)
    known = {
        "x": np.ones((2, 128), "f4"),
        "ids": np.array([[1], [5]]),
        "weights": np.ones((2, 1), "f4"),
    }
    exec(block.replace('"OUTPUT", 3', '"OUTPUT", 1'), known)
    assert known["y"].any() and '"OUTPUT", 3' in block
