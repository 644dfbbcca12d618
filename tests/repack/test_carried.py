"""What a conversion found out about the source is still said of the weights that were made from
its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import done, ktconv_done
from helpers.convert import read_json
from helpers.encoded import encoded_model
from helpers.families import bf16, numbered, random_weights, simple_config, write_checkpoint

EXPERT = 2  # whose matrices become zeros


def derived(source: Path, output: Path, command: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """JSON of a dry run, JSON of the run, the card."""
    words = (command, source, output, *(("--numa=2",) if command == "reshard" else ()))
    planned = json.loads(ktconv_done(*words, "--dry-run", "--json"))
    ran = json.loads(ktconv_done(*words, "--json"))
    return planned, ran, (output / "README.md").read_text()


@pytest.mark.parametrize(("command", "layout"), [("merge", "layers"), ("reshard", "safetensors")])
def test_zero_scales(tmp_path: Path, command: str, layout: str) -> None:
    model, _, _ = encoded_model(tmp_path / "model", "fp8 block, zero scales")
    options = ("--method=int8", "--numa=1", f"--layout={layout}", "--json")
    count = json.loads(done(model, tmp_path / "in", *options))["zero_scales"]
    planned, ran, card = derived(tmp_path / "in", tmp_path / "out", command)
    assert count == planned["zero_scales"] == ran["zero_scales"] == 12
    units = read_json(tmp_path / "out/ktconv.json")["units"].values()
    assert sum(unit.get("zero_scales", 0) for unit in units) == 12
    assert "- Zero scales in the source: 12, whose weights are all 0\n" in card


@pytest.mark.parametrize(("command", "layout"), [("merge", "layers"), ("reshard", "safetensors")])
def test_matrices_that_became_zeros(tmp_path: Path, command: str, layout: str) -> None:
    """One huge weight in each row; matrices of zeros in the source are no loss."""
    weights = random_weights(inner=256)
    for stack in weights:
        stack[EXPERT, :, 7] = 1e19
        stack[EXPERT - 1] = 0
    tensors = numbered("model.layers.0.mlp.experts", weights)
    tensors["model.layers.0.mlp.gate.weight"] = bf16(weights.gate[:, 0])
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(moe_intermediate_size=256))
    made = json.loads(
        done(model, tmp_path / "in", "--method=int4", "--numa=1", f"--layout={layout}", "--json")
    )
    assert made["nearly_zero_matrices"] == 3
    _, ran, card = derived(tmp_path / "in", tmp_path / "out", command)
    parts = 2 if command == "reshard" else 1
    names = [
        f"blk.0.ffn_{proj}_exps.{EXPERT}.numa.{part}.weight"
        for proj in ("down", "gate", "up")
        for part in range(parts)
    ]
    assert ran["nearly_zero_matrices"] == len(names)
    assert ran["nearly_zero_tensors"] == names[:5]
    assert f"- Warning: {len(names)} matrices became nearly all zeros" in card
    assert f"`{names[0]}`" in card
    done_by = ktconv_done("verify", tmp_path / "out", "--source", model, "--level", "weights")
    assert "not OK" not in done_by
