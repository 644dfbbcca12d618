"""What the metadata of GGUF files become in a config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers.families import (
    HIDDEN,
    bf16,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from helpers.gguf_files import EXPERTS, INNER, around, biases, experts, metadata, write_gguf

from ktconv.errors import CheckpointError, KtconvError, UsageError
from ktconv.families import table
from ktconv.families.activations import expert_activation, shared_activation
from ktconv.families.config import Config
from ktconv.families.routers import router_of
from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.config import CONFIG_NAME
from ktconv.source.gguf.architectures import ARCHITECTURES


def opened(directory: Path, architecture: str = "qwen3moe", **pairs: Any) -> Any:
    tensors = experts() | around() | (biases() if architecture == "gpt-oss" else {})
    path = write_gguf(directory / "m.gguf", tensors, metadata(**pairs), architecture=architecture)
    return open_checkpoint(path)


def test_every_architecture_is_one_of_llama_cpp() -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert ARCHITECTURES.keys() <= known
    # Of the families that ktconv knows, those that llama.cpp has too are in the table.
    ours = {kind for row in table.FAMILIES.rows for kind in row.types}
    assert {"qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral"} <= ours
    assert ours & {one.model_type for one in ARCHITECTURES.values()} >= {
        "afmoe", "dots1", "ernie4_5_moe", "exaone_moe", "lfm2_moe", "llama4", "olmoe",
    }  # fmt: skip


def test_keys(tmp_path: Path) -> None:
    checkpoint = opened(
        tmp_path, "glm4moe", leading_dense_block_count=0, expert_gating_func=2,
        expert_weights_norm=True, expert_weights_scale=2.5, nextn_predict_layers=0,
        expert_group_count=1, expert_group_used_count=1,
    )  # fmt: skip
    assert checkpoint.config.content == {
        "model_type": "glm4_moe", "hidden_size": HIDDEN,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
        "num_hidden_layers": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 0,
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    spec = router_of(checkpoint.config.content, 0)
    assert (spec.scoring, spec.top_k, spec.routed_scaling_factor) == ("sigmoid", 2, 2.5)
    assert spec.correction and not checkpoint.side_directory
    assert json.loads(checkpoint.made_files[CONFIG_NAME]) == checkpoint.config.content


def test_extra_layers(tmp_path: Path) -> None:
    """block_count counts those for multi-token prediction too."""
    tensors = experts(0) | experts(1) | {"blk.1.nextn.enorm.weight": np.ones(HIDDEN, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata(2, nextn_predict_layers=1))
    checkpoint = open_checkpoint(path)
    assert [layer.is_mtp for layer in checkpoint.layers] == [False, True]
    assert checkpoint.config.content["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("function", "kind", "method"),
    [(2, "deepseek_v3", None), (1, "deepseek_v2", "greedy"), (None, "deepseek_v2", "greedy")],
)
def test_one_architecture_of_three_families(
    function: int | None, kind: str, method: str | None, tmp_path: Path
) -> None:
    config = opened(tmp_path, "deepseek2", expert_gating_func=function).config.content
    assert (config["model_type"], config.get("topk_method")) == (kind, method)
    assert router_of(config, 0).n_group == 1  # llama.cpp has groups only where they are given


@pytest.mark.parametrize(
    ("architecture", "scoring", "shares"),
    [
        ("arctic", "softmax", True), ("bailingmoe", "softmax", False),
        ("deepseek", "softmax", False), ("deepseek2", "softmax", False),
        ("deepseek2-ocr", "softmax", False), ("grok", "softmax", True),
        ("llada-moe", "softmax", False), ("mimo2", "sigmoid", True),
        ("glm4moe", "sigmoid", True), ("glm-dsa", "sigmoid", True),
        ("qwen3moe", "softmax", False), ("afmoe", "sigmoid", True), ("step35", "sigmoid", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [None, 0])
def test_a_file_that_does_not_say_how_its_router_scores(
    function: int | None, architecture: str, scoring: str, shares: bool, tmp_path: Path
) -> None:
    """llama.cpp has a default for each architecture; 0 is the same as no number."""
    checkpoint = opened(
        tmp_path, architecture, expert_gating_func=function, expert_weights_scale=0.0
    )
    spec = router_of(checkpoint.config.content, 0)
    assert (spec.scoring, spec.renormalise) == (scoring, shares)
    assert spec.routed_scaling_factor > 0  # 0 is no factor


@pytest.mark.parametrize(("blocks", "tokens"), [(1, 154_880), (47, 4), (47, 154_880)])
def test_glm_4_7_flash_is_told_from_deepseek_v2(blocks: int, tokens: int, tmp_path: Path) -> None:
    """By its sizes, as llama.cpp does it, where the file has no expert_gating_func."""
    tensors = dict[str, Any]()
    for layer in range(blocks):
        tensors |= experts(layer) if layer == blocks - 1 else {}
    pairs = metadata(blocks, vocab_size=tokens, leading_dense_block_count=blocks - 1)
    path = write_gguf(tmp_path / "m.gguf", tensors, pairs, architecture="deepseek2")
    kind = "glm4_moe_lite" if (blocks, tokens) == (47, 154_880) else "deepseek_v2"
    config = open_checkpoint(path).config
    assert config.model_type == kind
    assert config.router(46).scoring == ("sigmoid" if kind == "glm4_moe_lite" else "softmax")


def test_activations(tmp_path: Path) -> None:
    assert opened(tmp_path, "gpt-oss").config.activation().alpha == 1.702
    assert opened(tmp_path, "gemma4").config.activation().function == "gelu_tanh"
    assert opened(tmp_path, "grok").config.activation().function == "gelu"
    with_mtp: dict[str, Any] = {
        "block_count": 2,
        "nextn_predict_layers": 1,
        "swiglu_clamp_exp": [0.0, 7.0],
    }
    assert opened(tmp_path, **with_mtp).config.content["swiglu_limit"] == [0.0, 7.0]
    with pytest.raises(CheckpointError, match=r"m\.gguf contradicts itself: swiglu_limit lists 3"):
        opened(tmp_path, **{**with_mtp, "swiglu_clamp_exp": [0.0, 7.0, 7.0]})
    assert "swiglu_limit" not in opened(tmp_path, swiglu_clamp_exp=[0.0]).config.content
    assert opened(tmp_path, swiglu_clamp_exp=7.0).config.content["swiglu_limit"] == 7.0


def test_a_limit_per_layer(tmp_path: Path) -> None:
    """llama.cpp clamps what Step's activation gives, and what others' gets."""
    limits: dict[str, Any] = {
        "swiglu_clamp_exp": [0.0, 7.0], "swiglu_clamp_shexp": [16.0, 0.0],
        "block_count": 2, "nextn_predict_layers": 1,
    }  # fmt: skip
    model = opened(tmp_path, **limits)
    assert [layer.activation.limit for layer in model.layers] == [math.inf, 7.0][
        : len(model.layers)
    ]
    step = opened(tmp_path, "step35", **limits).config.content
    assert step["swiglu_limits"] == [0.0, 7.0] and step["swiglu_limits_shared"] == [16.0, 0.0]
    clamped = expert_activation(Config(step), 1)
    assert clamped.limit == 7.0 and clamped.limit_after
    assert shared_activation(Config(step), 0).limit == 16.0
    assert not shared_activation(Config(step), 1).limited
    assert opened(tmp_path, "step35", swiglu_clamp_exp=7.0).layers[0].activation == clamped


def test_sizes_of_experts_without_a_key_of_their_own(tmp_path: Path) -> None:
    plain = opened(tmp_path, "llama", expert_feed_forward_length=None, feed_forward_length=INNER)
    assert plain.config.content["intermediate_size"] == INNER
    with pytest.raises(CheckpointError, match=r"the metadata of m\.gguf has intermediate_size 64"):
        opened(tmp_path, "llama", expert_feed_forward_length=None, feed_forward_length=64)


def test_dense_layers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"first_k_dense_replace in the metadata of m\.gguf"):
        opened(tmp_path, leading_dense_block_count=1)
    model = opened(tmp_path, leading_dense_block_count=1, interleave_moe_layer_step=2)
    assert "first_k_dense_replace" not in model.config.content


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ({"expert_count": 8}, "the metadata of m.gguf's num_experts is stale: it is 8"),
        ({"embedding_length": 64}, "has hidden size 128, but the metadata of m.gguf"),
        ({"expert_used_count": 5}, "metadata of m.gguf: num_experts_per_tok is 5, but a layer has"),
        ({"expert_count": "four"}, "num_experts"),
        ({"block_count": 3}, "layer 1 has no experts"),
        ({"expert_weights_scale": float("nan")}, "routed_scaling_factor is 'nan', not a finite"),
        ({"expert_weights_norm": [1]}, "norm_topk_prob is"),
    ],
)
def test_metadata_that_contradict_the_tensors(
    pairs: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, **pairs)
    assert reason in str(caught.value) and CONFIG_NAME not in str(caught.value)
    assert caught.value.hint


def test_without_an_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", experts(), architecture="")
    with pytest.raises(CheckpointError, match=r"m\.gguf has no general\.architecture"):
        open_checkpoint(path)


def test_an_unknown_architecture_keeps_its_name(tmp_path: Path) -> None:
    config = opened(tmp_path, "next-year-moe").config.content
    assert config["model_type"] == "next-year-moe" and config["num_experts"] == EXPERTS


# ---- --config --------------------------------------------------------------------------


def test_a_config_of_another_directory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", experts() | around(), metadata(expert_count=99))
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match=r"c has no config\.json|config\.json"):
        open_checkpoint(ModelSource(path, tmp_path / "c"))
    with pytest.raises(UsageError, match=r"--config .*/no is not a directory"):
        open_checkpoint(ModelSource(path, tmp_path / "no"))
    config = {"model_type": "mixtral", "num_local_experts": EXPERTS}
    (tmp_path / "c" / CONFIG_NAME).write_text(json.dumps(config))
    checkpoint = open_checkpoint(ModelSource(path, tmp_path / "c"))
    assert checkpoint.config.content == config and checkpoint.side_directory == tmp_path / "c"
    assert [source.name for source in checkpoint.sources] == [CONFIG_NAME, "m.gguf"]
    assert not checkpoint.made_files
    (tmp_path / "c" / CONFIG_NAME).write_text(json.dumps(config | {"num_local_experts": 5}))
    with pytest.raises(CheckpointError, match=r"config\.json's num_local_experts is stale: it is"):
        open_checkpoint(ModelSource(path, tmp_path / "c"))


def test_a_config_for_safetensors(tmp_path: Path) -> None:
    tensors = numbered("model.layers.0.mlp.experts", random_weights())
    write_checkpoint(tmp_path / "m", {**tensors, "norm": bf16(np.ones(4))}, simple_config())
    (tmp_path / "m" / CONFIG_NAME).rename(tmp_path / CONFIG_NAME)
    with pytest.raises(KtconvError, match=r"config\.json"):
        open_checkpoint(tmp_path / "m")
    checkpoint = open_checkpoint(ModelSource(tmp_path / "m", tmp_path))
    assert checkpoint.side_directory == tmp_path and checkpoint.path == tmp_path / "m"
