"""Layers whose gate, up and down projections are three tensors with all experts, and the names of
GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    Tensor,
    Weights,
    bf16,
    fused,
    numbered,
    random_weights,
    read_matrix,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.families.names import (
    is_in_experts,
    norm_tensors,
    router_tensors,
    shared_expert_tensors,
    split_name,
)
from ktconv.source import PROJECTIONS, Checkpoint, open_checkpoint

USUAL = "model.layers.0.mlp.experts"
WORDS = {
    USUAL: ("gate_proj", "up_proj", "down_proj"),
    "blk.0": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
}
INNER = 192


def apart(source: str, weights: Weights, suffix: str = ".weight") -> dict[str, Tensor]:
    words = WORDS[source]
    return {f"{source}.{word}{suffix}": bf16(one) for word, one in zip(words, weights, strict=True)}


def opened(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Checkpoint:
    sizes = {"moe_intermediate_size": INNER, **config}
    return open_checkpoint(write_checkpoint(directory, tensors, simple_config(**sizes)))


def assert_has(checkpoint: Checkpoint, weights: Weights) -> None:
    [layer] = checkpoint.layers
    assert len(layer.experts) == len(weights.gate)
    for expert, matrices in enumerate(layer.experts):
        for projection in PROJECTIONS:
            expected = getattr(weights, projection)[expert]
            np.testing.assert_array_equal(read_matrix(matrices[projection]), expected)


@pytest.mark.parametrize(("source", "suffix"), [(USUAL, ""), (USUAL, ".weight"), ("blk.0", "")])
def test_three_tensors(source: str, suffix: str, tmp_path: Path) -> None:
    weights = random_weights(inner=INNER)
    checkpoint = opened(tmp_path, apart(source, weights, suffix))
    assert_has(checkpoint, weights)
    assert checkpoint.layers[0].source == source
    assert not checkpoint.other_tensors


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    weights = random_weights(inner=INNER)
    usual = fused("blk.0", weights, transposed=False, suffix=".weight")
    renamed = {"gate_up_proj": "ffn_gate_up_exps", "down_proj": "ffn_down_exps"}
    tensors: dict[str, Tensor] = {
        f"blk.0.{renamed[name.split('.')[2]]}.weight": one for name, one in usual.items()
    }
    assert_has(opened(tmp_path, tensors), weights)


def old_names(weights: Weights) -> dict[str, Tensor]:
    """blk.0.ffn_gate.5.weight"""
    usual = numbered("x", weights, ("ffn_gate", "ffn_up", "ffn_down"))
    parts = (name.split(".") for name in usual)
    names = (f"blk.0.{matrix}.{expert}.weight" for _, expert, matrix, _ in parts)
    return dict(zip(names, usual.values(), strict=True))


def test_numbers_after_the_matrix(tmp_path: Path) -> None:
    weights = random_weights(inner=INNER)
    tensors = old_names(weights)
    assert_has(opened(tmp_path, tensors), weights)
    del tensors["blk.0.ffn_up.2.weight"]
    with pytest.raises(CheckpointError, match=r"^blk\.0\.ffn_up\.2\.weight is missing"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ffn_up_exps.weight": None}, r"blk\.0\.ffn_up_exps is missing"),
        ({"ffn_up_exps.weight": (4, 190, 128)}, r"\[4, 190, 128\] and .* are not \[E, I, H\]"),
        ({"ffn_down_exps.weight": (4, 192, 128)}, r"are not \[E, I, H\], \[E, I, H\] and \[E, H"),
        ({"ffn_gate_exps.weight": (192, 128)}, r"ffn_gate_exps.weight \[192, 128\], .* are not"),
        ({"ffn_gate_up_exps.weight": (4, 384, 128)}, "are two ways to store the same experts"),
        ({"ffn_gate_exps.odd": (4,)}, r"ffn_gate_exps.odd \(F32\) is not a known companion"),
        ({"ffn_gate.0.weight": (192, 128)}, "the experts of blk.0 are stored in two ways"),
    ],
)
def test_tensors_that_do_not_fit(
    change: dict[str, tuple[int, ...] | None], reason: str, tmp_path: Path
) -> None:
    tensors = apart("blk.0", random_weights(inner=INNER))
    for name, shape in change.items():
        if shape is None:
            del tensors[f"blk.0.{name}"]
        else:
            ones = np.ones(shape, np.float32)
            tensors[f"blk.0.{name}"] = ones if name.endswith("odd") else bf16(ones)
    with pytest.raises(CheckpointError, match=reason) as caught:
        opened(tmp_path, tensors)
    assert caught.value.hint


def test_names_of_gguf_files() -> None:
    assert split_name("blk.12.ffn_down_exps.weight") == ("blk.12", "ffn_down_exps.weight")
    assert split_name("blk.12.ffn_gate_exps.weight.scale") == (
        "blk.12", "ffn_gate_exps.weight.scale",
    )  # fmt: skip
    assert split_name("blk.12.ffn_up.7.weight") == ("blk.12", "7.ffn_up.weight")
    for other in (
        "blk.1.ffn_gate.weight", "blk.1.ffn_gate_inp.weight", "blk.1.ffn_up_shexp.weight",
        "blk.1.ffn_norm_exps.weight", "blk.1.exp_probs_b.bias", "blk.ffn_up_exps.weight",
        "blk.1.ffn_latent_up.weight", "blk.1.nextn.eh_proj.weight", "blk.1", "ffn_up_exps.weight",
        "blk.1.ffn_gate_exps.5.numa.0.weight",  # what ktconv writes
    ):  # fmt: skip
        assert split_name(other) is None, other
        assert not is_in_experts(other)
    assert "blk.3.ffn_gate_inp.weight" in router_tensors("blk.3").weight
    assert "blk.3.ffn_gate_inp.bias" in router_tensors("blk.3").bias
    assert "blk.3.exp_probs_b.bias" in router_tensors("blk.3").correction
    assert {"blk.3.ffn_norm.weight", "blk.3.post_attention_norm.weight"} <= {*norm_tensors("blk.3")}
    shared = shared_expert_tensors("blk.3")
    assert "blk.3.ffn_down_shexp.weight" in {one.down for one in shared}
    assert "blk.3.ffn_gate_inp_shexp.weight" in {one.gating for one in shared}


def test_dense_and_extra_layers(tmp_path: Path) -> None:
    """blk.0 is dense, blk.1 has experts, and blk.2 is an MTP layer by its other tensors."""
    tensors: dict[str, Tensor] = {"blk.0.ffn_gate.weight": bf16(np.ones((8, 128)))}
    for index in (1, 2):
        stack = apart("blk.0", random_weights(inner=INNER, seed=index))
        tensors |= {name.replace("blk.0", f"blk.{index}"): one for name, one in stack.items()}
    tensors["blk.2.nextn.eh_proj.weight"] = bf16(np.ones((8, 8)))
    checkpoint = opened(tmp_path, tensors, num_hidden_layers=2)
    assert [(layer.index, layer.is_mtp) for layer in checkpoint.layers] == [(1, False), (2, True)]
