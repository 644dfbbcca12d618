"""Values of options that need no pydantic are what typer makes of them, and it refuses what it
refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from helpers.paths import EXAMPLE
from typer.testing import CliRunner

from ktconv.cli import parsing

WORDS = [
    [],
    ["--text", "a b"],
    ["--text", "ü"],
    ["--text", "a\x1bb"],
    ["--whole", "2"],
    ["--whole", "002"],
    ["--whole", " 2"],
    ["--whole", "-2"],
    ["--whole", "9"],
    ["--whole", "2.5"],
    ["--whole", "1_0"],
    ["--whole", "x"],
    ["--number", "0.5"],
    ["--number", "nan"],
    ["--kind", "int4"],
    ["--kind", "INT4"],
    ["--kind", "int5"],
    ["--many", "a", "--many", "b"],
    ["--path", "there"],
    ["--path", "not/there"],
    ["--path", "/"],
    ["--path", "loop"],
    ["--path", "locked"],
    ["--flag"],
    ["--no-flag"],
]


def outcome(words: list[str]) -> tuple[int, str]:
    """Exit code and everything that a command with a parameter of each kind prints."""
    app = typer.Typer(rich_markup_mode=None)

    @app.command(cls=parsing.Command)
    def show(
        text: Annotated[str, parsing.option("t", "T")] = "none",
        whole: Annotated[int, parsing.option("w", "N", min=0, max=8)] = 1,
        number: Annotated[float, parsing.option("n", "X")] = 1.5,
        kind: Annotated[
            Literal["int4", "fp8"], parsing.choice(Literal["int4", "fp8"], "k")
        ] = "fp8",
        many: Annotated[list[str] | None, parsing.option("m", "M")] = None,
        path: Annotated[Path | None, parsing.option("p", "P")] = None,
        flag: Annotated[bool, parsing.flag("--flag/--no-flag", "f")] = False,
    ) -> None:
        print([text, whole, number, kind, many, path, flag])

    found = CliRunner().invoke(app, words)
    return found.exit_code, found.output


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_values_are_those_of_typer(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    (tmp_path / "locked").touch(0o000)
    (tmp_path / "loop").symlink_to("loop")
    if words[-1:] == ["locked"]:  # root reads everything
        own = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != "locked" and own(path, mode))
    found = outcome(words)
    monkeypatch.setattr(parsing, "converted_plainly", lambda params: params)
    assert found == outcome(words)


def test_a_conversion_imports_no_pydantic(tmp_path: Path) -> None:
    """It would take a fifth of the time in which a command starts."""
    code = (
        "import sys; from ktconv.cli.app import application_for as f; words = sys.argv[1:]\n"
        "try: f(words)()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'pydantic' not in sys.modules"
    )
    words = ["quantize-cpu", str(EXAMPLE), str(tmp_path / "out"), "--method=int4", "--numa=2"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)
