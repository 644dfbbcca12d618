"""Every family that transformers has, with LoRA in its experts, against the model's own code."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from helpers.family_list import SAVED

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers
from helpers.adapted import apart, logits, train_a_little, with_gradient
from helpers.family_models import build
from safetensors.torch import load_file

from ktconv.model.sites import find_experts
from ktconv.train import merge, prepare, save

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.mark.parametrize("name", SAVED)
def test_a_family(name: str, tmp_path: Path) -> None:
    """The model with LoRA beside its experts computes, forward and backward, what its own code does
    with the same matrices added to its weights."""
    if not hasattr(transformers, SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    model = build(SAVED[name]).float().eval()
    merged, before = copy.deepcopy(model), logits(model)
    prepared = prepare(model, rank=3, alpha=6)
    assert prepared.layers == SAVED[name].layers
    assert not prepared.untried
    assert apart(logits(model), before) < 0.01
    train_a_little(prepared)
    save(model, tmp_path)
    merge(merged, tmp_path)
    ours, our_gradient = with_gradient(model)
    theirs, their_gradient = with_gradient(merged)
    assert apart(before, theirs) > 0.02
    assert apart(ours, theirs) < 0.01
    assert apart(our_gradient, their_gradient) < 0.06
    for one in prepared.parameters():
        assert one.grad is not None
        assert one.grad.any()
    own = {id(one) for one in prepared.parameters()}
    assert all(one.grad is None for one in model.parameters() if id(one) not in own)


# What checkpoints call a matrix of expert 1 of the last layer.
KEYS = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.1.w1",
    "qwen3_moe": "model.layers.1.mlp.experts.1.gate_proj",
    "qwen3_vl_moe, resaved": "model.language_model.layers.1.mlp.experts.1.gate_proj",
    "gpt_oss": "model.layers.1.mlp.experts.1.gate_proj",
    "lfm2_moe": "model.layers.1.feed_forward.experts.1.w1",
    "step3p7": "model.language_model.layers.1.moe.experts.1.gate_proj",
    "granitemoe": "model.layers.1.block_sparse_moe.experts.1.w1",
    "nemotron_h": "model.layers.1.mixer.experts.1.up_proj",
}


@pytest.mark.parametrize("name", KEYS)
def test_names_in_the_file(name: str, tmp_path: Path) -> None:
    """Those of checkpoints with a matrix for each expert, which PEFT and engines know."""
    model = build(SAVED[name])
    size = find_experts(model)[max(SAVED[name].layers)].own
    prepare(model, rank=3)
    save(model, tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    key = KEYS[name].replace("layers.1.", f"layers.{max(SAVED[name].layers)}.")
    assert stored[f"base_model.model.{key}.lora_A.weight"].shape == (3, size.hidden)
    assert stored[f"base_model.model.{key}.lora_B.weight"].shape == (size.intermediate, 3)
    layers, matrices = len(SAVED[name].layers), 3 if size.gated else 2
    assert len(stored) == layers * matrices * size.count * 2
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 3)
    assert key.rpartition(".")[2] in config["target_modules"]
