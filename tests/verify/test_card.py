"""Figures of a verification in the output's model card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ktconv.cli.app import app
from ktconv.verify.card import BEGIN, END, section

Convert = Callable[..., Path]


def verify(output: Path, *options: object) -> Result:
    return CliRunner().invoke(app, ["verify", str(output), *map(str, options), "--card"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x11
    path.write_bytes(data)


def test_figures_come_once_and_go_when_a_check_fails(model: Path, damaged: Convert) -> None:
    output = damaged()
    card = output / "README.md"
    plain = card.read_text()
    for _ in range(2):
        done = verify(output, "--source", model, "--level", "weights")
        assert done.exit_code == 0, done.output
        text = card.read_text()
        assert text.startswith(plain) and text.count(BEGIN) == text.count(END) == 1
        assert "relative RMS error 0." in text and "--level weights" in text
        assert str(model) not in text and str(output) not in text
    flip(sorted(output.glob("*.safetensors"))[0])
    assert verify(output, "--source", model, "--level", "weights").exit_code == 1
    assert card.read_text() == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--card does not apply without --source"),
        (["--source", "{model}"], "which is not there"),
        (["{model}"], "when comparing two conversions"),
    ],
)
def test_refusals(model: Path, damaged: Convert, options: list[str], message: str) -> None:
    output = damaged()
    (output / "README.md").unlink()
    done = verify(output, *(option.format(model=model) for option in options))
    assert done.exit_code == 2 and message in done.output
    assert not (output / "README.md").exists()


@pytest.mark.parametrize("text", [BEGIN, END, "\xff"])
def test_a_damaged_card_is_left_alone(model: Path, damaged: Convert, text: str) -> None:
    output = damaged()
    (output / "README.md").write_bytes(text.encode("latin-1"))
    done = verify(output, "--source", model, "--level", "structure")
    assert done.exit_code != 0 and "README.md" in done.output
    assert (output / "README.md").read_bytes() == text.encode("latin-1")


def test_a_text_is_shown_by_its_name_alone() -> None:
    model = {
        "perplexity_source": 2.0, "perplexity_converted": 2.1, "perplexity_increase": 0.05,
        "kl_mean": 0.01, "kl_p99": 0.1, "top1_agreement": 0.9, "tokens": 5, "layers": [],
        "text": "/home/me/secret/prose.txt", "generation": None,
    }  # fmt: skip
    facts = {"level": "model", "ktconv_version": "1", "sample": 0.5, "model": model}
    text = section(facts)
    assert "prose.txt" in text and "secret" not in text and "a sample of 0.5" in text
