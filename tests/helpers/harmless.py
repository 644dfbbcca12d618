"""Running a command whose output must not obey what files say."""

from __future__ import annotations

import unicodedata

from click.testing import CliRunner, Result

from ktconv.cli.app import app


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def assert_harmless(text: str) -> None:
    """Only line feeds, and nothing that a terminal obeys or that hides."""
    for character in text.replace("\n", ""):
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp"), repr(text)
        assert unicodedata.bidirectional(character) not in (
            "LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"
        ), repr(text)  # fmt: skip


def assert_safe(result: Result, code: int | None = None) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert code is None or result.exit_code == code, result.stderr
    assert_harmless(result.stdout)
    assert_harmless(result.stderr)
    assert not any(line.startswith("Error: forged") for line in result.output.split("\n"))
