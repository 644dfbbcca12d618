"""Staged files of several attempts at one unit."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli import contents, done, write_model

from ktconv.cli.parsing import with_defaults

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_what_dead_attempts_left_is_removed(tmp_path: Path, layout: str) -> None:
    model, options = write_model(tmp_path / "model", layers=2, experts=1), f"--layout={layout}"
    done(model, tmp_path / "clean", options)
    output = tmp_path / "output"
    assert "missing" in done(model, output, options, "--layers=0")
    name = "model-00002-of-00003.safetensors" if layout == "safetensors" else "_layer_1"
    stale = output / ".ktconv" / f"{name}.0f3a-7.part"
    stale.touch() if layout == "safetensors" else stale.mkdir()
    of_other_layer = output / ".ktconv" / "_layer_10.0f3a-7.part"
    of_other_layer.touch()
    done(model, output, options, "--layers=1")
    assert contents(output) == contents(tmp_path / "clean")


@pytest.mark.parametrize(("words", "expected"), [
    ("a b --ray", "a b --ray=auto"),
    ("--ray a b", "--ray=auto a b"),
    ("--ray --numa 2", "--ray=auto --numa 2"),
    ("--ray head:6379 a", "--ray head:6379 a"),
    ("--ray local a", "--ray local a"),
    ("--ray ./local a", "--ray=auto ./local a"),
    ("--ray hf://org/name a", "--ray=auto hf://org/name a"),
    ("--ray=head:6379 a", "--ray=head:6379 a"),
    ("", ""),
])  # fmt: skip
def test_an_address_can_be_left_out(words: str, expected: str) -> None:
    assert with_defaults(words.split()) == expected.split()
