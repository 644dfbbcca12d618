"""README.md: its session, its example in Python, its commands, its length."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.cli import ktconv
from helpers.paths import EXAMPLE, ROOT

from ktconv.cli.commands import COMMANDS

TEXT = (ROOT / "README.md").read_text("utf-8")
# Seconds, rates, and levels of this machine, with the errors of their kernels.
OF_A_RUN = re.compile(r"in [\d.]+ s|[\d.]+ [kMG]B/s|on scalar[\w, ]*?, (?=16)|within [\d.]+")
OUTPUT_ERROR = re.compile(r"(?<=max output error vs\. source: )[\d.]+|(?<=worst expert \d: )[\d.]+")


def test_it_is_short() -> None:
    assert TEXT.count("\n") <= 150


def test_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands print on stdout is what stands there."""
    pytest.importorskip("transformers")  # level layers says what it has taken from the model
    shutil.copytree(EXAMPLE, tmp_path / EXAMPLE.name)
    monkeypatch.chdir(tmp_path)
    session = next(one for one in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL) if one[0] == "$")
    parts = re.split(r"^\$ ktconv (.*)\n", session, flags=re.MULTILINE)[1:]
    assert len(parts) == 4
    for words, shown in zip(parts[::2], parts[1::2], strict=True):
        done = ktconv(*shlex.split(words))
        assert done.exit_code == 0, done.stderr
        # Hidden states come from PyTorch, which has other kernels on other machines.
        found, wanted = (OUTPUT_ERROR.findall(text) for text in (done.stdout, shown))
        assert [float(n) for n in found] == pytest.approx([float(n) for n in wanted], rel=0.01)
        done_text, shown = (OUTPUT_ERROR.sub("...", text) for text in (done.stdout, shown))
        assert OF_A_RUN.sub("...", done_text).strip() == OF_A_RUN.sub("...", shown).strip()


def test_the_example_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    block = next(one for one in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    exec(block, {})
    assert re.fullmatch(r"True 0\.10\d+\nTrue\n", capsys.readouterr().out)


def test_the_table_has_every_command() -> None:
    rows = re.findall(r"^\| (`.*?) \| [^|]+ \| \[docs\]", TEXT, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(named) == sorted(COMMANDS)
