"""The example of docs/kt-wrapper.md, and its list of methods."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from helpers.convert import convert
from helpers.paths import EXAMPLE, ROOT

pytest.importorskip("torch")

from ktconv.compat.kt.methods import METHODS

pytestmark = pytest.mark.torch

PAGE = (ROOT / "docs/kt-wrapper.md").read_text(encoding="utf-8")


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "MODEL")
    convert(tmp_path / "MODEL", tmp_path / "OUTPUT", method="int4")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
    printed = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert printed and capsys.readouterr().out.splitlines() == printed


def test_every_method_has_a_row() -> None:
    section = PAGE.split("## Methods")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(METHODS)


def test_tests_have_the_numbers_of_the_table() -> None:
    numbered = set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert numbered == set(re.findall(r"^def test_d(\d+)_", tests, re.MULTILINE))
