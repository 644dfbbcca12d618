"""Experts whose weights are tiny, huge or denormal: converted, verified, and named if they are
lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv, ktconv_done, refused
from helpers.convert import read_json
from helpers.corrupt import check
from helpers.families import bf16, numbered, random_weights, simple_config, write_checkpoint

from ktconv.formats import output_formats
from ktconv.targets.encoded.scheme import names_of

pytestmark = pytest.mark.slow

ORDINARY = 3  # experts
CPU = [*output_formats(), *names_of("quantize-cpu")]
METHODS = [("quantize-cpu", "--method", name) for name in CPU]
METHODS += [("quantize-gpu", "--scheme", name) for name in names_of("quantize-gpu")]
SEARCHED = [("quantize-gpu", "--scheme", name, "--scale", "search") for name in ("W4A16", "W8A16")]
HALF = {"gptq-int4", "awq"}  # whose scales are binary16, of 65504 at most


def model_of(directory: Path, *largest: float, outlier: float = 0.0, encode: Any = bf16) -> Path:
    """Three ordinary experts and, for each of `largest`, one whose largest weights are that;
    `outlier`: one weight of each matrix of an ordinary one."""
    count = ORDINARY + len(largest)
    weights = random_weights(experts=count)
    for stack in weights:
        for expert, size in enumerate(largest, ORDINARY):
            wide = stack[expert].astype(np.float64)
            stack[expert] = (wide / np.abs(wide).max() * size).astype(np.float32)
        if outlier:
            stack[2, 5, 7] = outlier
    tensors = numbered("model.layers.0.mlp.experts", weights, encode=encode)
    tensors["model.layers.0.mlp.gate.weight"] = bf16(weights.gate[:, 0])
    return write_checkpoint(directory, tensors, simple_config(num_experts=count))


@pytest.mark.parametrize("words", METHODS, ids=" ".join)
def test_float32_weights_beyond_bf16(words: tuple[str, ...], tmp_path: Path) -> None:
    """What is finite is not called an infinity where a format rounds to bf16 first."""
    model = model_of(tmp_path / "model", 3.4e38, encode=np.float32)
    result = ktconv(words[0], model, tmp_path / "output", *words[1:])
    assert "NaN" not in result.stderr
    if result.exit_code == 0:
        assert check(tmp_path / "output", model, "weights").passed
    else:
        refused(result, 2, "")
        assert any(one in result.stderr for one in ("beyond bf16", "would have infinite weights"))


def converted(model: Path, output: Path, words: tuple[str, ...]) -> str:
    more = ("--numa=1",) if words[2] in output_formats() else ()
    return ktconv_done(words[0], model, output, *words[1:], "--threads=2", *more)


# The largest weights of experts; models of what all formats take, and of what some refuse.
EXTREMES = {"tiny": (1e-39, 1e-30, 1e-22, 1e-20), "huge": (1e20, 1e30), "largest": (3e38,)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("extremes")
    return {name: model_of(root / name, *largest) for name, largest in EXTREMES.items()}


@pytest.mark.parametrize("words", [*METHODS, *SEARCHED], ids=" ".join)
def test_what_is_tiny_or_huge_verifies(
    words: tuple[str, ...], models: dict[str, Path], tmp_path: Path
) -> None:
    for name, model in models.items():
        if name != "tiny" and words[2] in HALF:
            said = ktconv(words[0], model, tmp_path / f"no {name}", *words[1:])
            refused(said, 2, "weights of which f16 scales are infinite")
            continue
        if name == "largest" and words[2] in ("mxfp4", "MXFP4A16"):
            said = ktconv(words[0], model, tmp_path / f"no {name}", *words[1:])
            refused(said, 2, "would have infinite weights", words[2])
            continue
        output = tmp_path / name
        converted(model, output, words)
        result = check(output, model, "weights")
        assert result.passed, (name, [one.message for one in result.failures])
        rows = result.facts["weights"]["worst"]
        assert all(np.isfinite(row["relative_rms_error"]) for row in rows)
        assert all(0 <= row["relative_rms_error"] <= 1.001 for row in rows)


@pytest.mark.parametrize("words", [
    ("quantize-cpu", "--method", "nvfp4"), ("quantize-cpu", "--method", "int4"),
    ("quantize-cpu", "--method", "mxfp4"), ("quantize-gpu", "--scheme", "NVFP4A16"),
], ids=" ".join)  # fmt: skip
def test_matrices_that_become_zeros_are_named(words: tuple[str, ...], tmp_path: Path) -> None:
    """One huge weight, where scales are of a whole matrix or far below it."""
    model = model_of(tmp_path / "model", outlier=1e19)
    said = converted(model, tmp_path / "out", words)
    verified = ktconv_done(
        "verify", tmp_path / "out", "--source", model, "--level", "weights", "--json"
    )
    notes = [note for note in json.loads(verified)["notes"] if "nearly all zeros" in note]
    card = (tmp_path / "out/README.md").read_text()
    if words[2] in ("nvfp4", "NVFP4A16"):
        assert "warning: 3 matrices became nearly all zeros" in said
        assert "model.layers.0.mlp.experts.2.down_proj" in said
        assert "- Warning: 3 matrices became nearly all zeros" in card
        assert len(notes) == 1 and "layer 0, expert 2, down" in notes[0]
        units = read_json(tmp_path / "out/ktconv.json")["units"].values()
        records = [one for unit in units for one in unit["tensors"].values()]
        shares = [one["zero_share"] for one in records if "zero_share" in one]
        assert sorted(shares)[-3:] == [0.9999] * 3
        again = ktconv_done(words[0], model, tmp_path / "two", *words[1:], "--json")
        facts = json.loads(again)
        assert facts["nearly_zero_matrices"] == len(facts["nearly_zero_tensors"]) == 3
    else:
        assert "nearly all zeros" not in said and not notes and "Warning" not in card


def test_experts_of_zeros_are_not_lost(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", 0.0)
    for method in ("nvfp4", "int4", "rawint4", "bf16"):
        said = converted(model, tmp_path / method, ("quantize-cpu", "--method", method))
        assert "nearly all zeros" not in said
        result = check(tmp_path / method, model, "weights")
        assert result.passed and not any("zeros" in note for note in result.facts["notes"])
