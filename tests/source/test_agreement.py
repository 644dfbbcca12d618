"""Settings of config.json and tensors beside the experts that cannot be right, or are odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    HIDDEN,
    Tensor,
    bf16,
    fp8,
    fused,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.source import Checkpoint, open_checkpoint

BLOCK = "model.layers.0.mlp"


def ones(*shape: int) -> Tensor:
    return bf16(np.ones(shape, np.float32))


def opened(directory: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Checkpoint:
    every = numbered(f"{BLOCK}.experts", random_weights()) | (tensors or {})
    return open_checkpoint(write_checkpoint(directory, every, simple_config(**config)))


def refusal(directory: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(directory, tensors, **config)
    assert caught.value.hint
    return str(caught.value)


# ---- tensors beside the experts --------------------------------------------------------

GLM: dict[str, Any] = {"model_type": "glm4_moe", "num_experts_per_tok": 2}
V4: dict[str, Any] = {"model_type": "deepseek_v4", "num_experts_per_tok": 2, "vocab_size": 10}
GEMMA: dict[str, Any] = {"model_type": "gemma4", "num_experts_per_tok": 2}
INKLING: dict[str, Any] = {"model_type": "inkling", "n_shared_experts": 2}


@pytest.mark.parametrize(
    ("config", "name", "right", "wrong"),
    [
        (GLM, "gate.weight", [(4, HIDDEN)], [(4, 64), (8, HIDDEN)]),
        (GLM, "gate.e_score_correction_bias", [(4,), (1, 4)], [(8,), (4, 1), ()]),
        (GLM, "shared_expert_gate.weight", [(1, HIDDEN), (7,)], []),  # without a shared expert
        ({"model_type": "gpt_oss"}, "router.bias", [(4,)], [(5,)]),
        (INKLING, "gate.weight", [(6, HIDDEN)], [(4, HIDDEN)]),
        (INKLING, "gate.bias", [(4,)], [(6,)]),
        (INKLING, "gate.global_scale", [(1,), ()], [(4,)]),
        ({"model_type": "muse_spark"}, "experts.post_expert_norm.weight", [(HIDDEN,)], [(4,)]),
        ({"model_type": "muse_spark", "hidden_size": 512, "moe_hidden_size": HIDDEN},
         "pre_expert_proj.weight", [(HIDDEN, 512), (512, HIDDEN)], [(HIDDEN, 64)]),
        ({"model_type": "new_moe"}, "gate.e_score_correction_bias", [(4,)], [(3,)]),
    ],
)  # fmt: skip
def test_shapes_beside_the_experts(
    config: dict[str, Any], name: str, right: list[Any], wrong: list[Any], tmp_path: Path
) -> None:
    biases: dict[str, Tensor] = {}
    if config["model_type"] == "gpt_oss":
        for expert in range(4):
            for word in ("gate_proj", "up_proj", "down_proj"):
                biases[f"{BLOCK}.experts.{expert}.{word}.bias"] = ones(HIDDEN)
    full = f"{BLOCK}.{name}"
    for shape in right:
        opened(tmp_path, {**biases, full: ones(*shape)}, **config)
    for shape in wrong:
        message = refusal(tmp_path, {**biases, full: ones(*shape)}, **config)
        assert full in message and str(list(shape)) in message


def test_scales_for_each_expert(tmp_path: Path) -> None:
    layer = "model.layers.0"
    experts = numbered(f"{layer}.experts", random_weights())
    for name, right, wrong in (
        ("router.per_expert_scale", 4, 8), ("router.scale", HIDDEN, 4),
        ("pre_feedforward_layernorm_2.weight", HIDDEN, 4),
    ):  # fmt: skip
        config = simple_config(**GEMMA)
        for size in (right, wrong):
            path = write_checkpoint(tmp_path, {**experts, f"{layer}.{name}": ones(size)}, config)
            if size == right:
                open_checkpoint(path)
            else:
                with pytest.raises(CheckpointError, match=rf"{name} has shape \[{wrong}\]"):
                    open_checkpoint(path)


def test_tables_of_experts_by_token(tmp_path: Path) -> None:
    source = "layers.0.ffn"
    experts = numbered(f"{source}.experts", random_weights(), ("w1", "w3", "w2"))
    for shape, right in (((10, 2), True), ((12, 2), True), ((10, 3), False), ((9, 2), False)):
        table = np.zeros(shape, np.int64)
        tensors: dict[str, Tensor] = {**experts, f"{source}.gate.tid2eid": table}
        path = write_checkpoint(tmp_path, tensors, simple_config(**V4))
        if right:
            open_checkpoint(path)
        else:
            with pytest.raises(CheckpointError, match="tid2eid has shape"):
                open_checkpoint(path)
    tensors = {**experts, f"{source}.gate.tid2eid": ones(10, 2)}
    with pytest.raises(CheckpointError, match="not a table of integers"):
        open_checkpoint(write_checkpoint(tmp_path, tensors, simple_config(**V4)))


def test_shared_experts(tmp_path: Path) -> None:
    def shared(gate: Any = (64, HIDDEN), up: Any = (64, HIDDEN), down: Any = (HIDDEN, 64)) -> Any:
        shapes = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        return {f"{BLOCK}.shared_experts.{k}.weight": ones(*v) for k, v in shapes.items()}

    assert opened(tmp_path, shared(), **GLM).notes == []
    assert opened(tmp_path, shared(), **GLM, moe_shared_expert_intermediate_size=64).notes == []
    [note] = opened(tmp_path, shared(), **GLM, n_shared_experts=2).notes
    assert (
        note == "shared experts have the intermediate size 64, not 256 as by config.json (layer 0)"
    )
    assert opened(tmp_path, shared((64, 128), (64, 128)), **GLM, n_shared_experts=None).notes == []
    for changes in ({"gate": (32, HIDDEN)}, {"down": (HIDDEN, 32)}, {"up": (64, 96)}):
        assert "shared_experts" in refusal(tmp_path, shared(**changes), **GLM)
    gating = {f"{BLOCK}.shared_expert_gate.weight": ones(1, 64)}
    assert "shared_expert_gate.weight has shape [1, 64]" in refusal(
        tmp_path, shared() | gating, **GLM
    )


# ---- settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"scoring_func": "sigmoid"}, "qwen3_moe scores by softmax, not sigmoid"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "by sigmoid, not softmax"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc", "scoring_func": "softmax"},
         "scores by sigmoid, not softmax"),
        ({**GLM, "n_group": 3, "topk_group": 1}, "4 experts cannot be routed to by 1 of 3 groups"),
        ({**GLM, "n_group": 4, "topk_group": 1}, "2 experts per token are more than the 1 there"),
        ({"routed_scaling_factor": -1e30}, "routed_scaling_factor is -1e+30, not a finite number"),
        ({"routed_scaling_factor": 1e30}, "routed_scaling_factor is 1e+30, not a finite number"),
        ({"routed_scaling_factor": 10**400}, "routed_scaling_factor is 1000"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rms_norm_eps": 1e6}, "rms_norm_eps is 1000000.0"),
        ({"swiglu_alpha": -1.7}, "swiglu_alpha is -1.7"),
        ({"moe_router_logit_softcapping": 1e30}, "moe_router_logit_softcapping is 1e+30"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_right(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path, **config)


def test_settings_that_are_odd(tmp_path: Path) -> None:
    for factor in (0, 1e3):
        [note] = opened(tmp_path, routed_scaling_factor=factor).notes
        assert f"routed_scaling_factor {factor:g}" in note
    [note] = opened(tmp_path, scoring_func="tanh").notes
    assert "scoring_func 'tanh'" in note and "score by softmax" in note
    usual: dict[str, Any] = {
        "scoring_func": "noaux_tc",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 16.0,
    }
    assert opened(tmp_path, model_type="dots1", **usual).notes == []


# ---- quantization_config ---------------------------------------------------------------

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "said",
    [
        FP8, {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "awq"},
        {"quant_method": "gptq", "bits": 4}, {**FP8, "modules_to_not_convert": ["lm_head"]},
    ],
)  # fmt: skip
def test_weights_that_are_not_quantized_as_declared(said: dict[str, Any], tmp_path: Path) -> None:
    message = refusal(tmp_path, quantization_config=said)
    assert "experts.0.up_proj.weight is BF16, as all weights here, but" in message
    assert f"quant_method {said['quant_method']!r}" in message


@pytest.mark.parametrize(
    "said",
    [
        {**FP8, "modules_to_not_convert": ["lm_head", "mlp.experts"]},
        {"quant_method": "compressed-tensors", "ignore": ["lm_head", r"re:.*mlp\.experts.*"]},
        {"quant_method": "modelopt", "exclude_modules": ["*experts*"]},
        {"quant_method": "gptq", "dynamic": {"-:.*experts.*": {}}},
        {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["model.layers.0.mlp"]},
        None,
    ],
)
def test_experts_that_are_left_alone_as_declared(said: Any, tmp_path: Path) -> None:
    assert opened(tmp_path, quantization_config=said).notes == []


def test_other_weights_are_quantized(tmp_path: Path) -> None:
    """As in bitsandbytes checkpoints of models whose experts are stacked: nothing but odd."""
    attention = "model.layers.0.self_attn.q_proj.weight"
    for name in (f"{attention}.absmax", f"{attention}_scale_inv"):
        [note] = opened(tmp_path, {name: ones(4)}, quantization_config=FP8).notes
        assert note.startswith("the experts are BF16, but quantization_config in config.json")
    [note] = opened(tmp_path, quantization_config={"quant_method": "compressed-tensors"}).notes
    assert "does not say that they are left as they are" in note


@pytest.mark.parametrize("name", ["gate.weight", "gate.qweight"])
def test_a_layer_without_a_router(name: str, tmp_path: Path) -> None:
    """Two layers with experts of which one has a router."""
    second = numbered("model.layers.1.mlp.experts", random_weights(seed=1))
    router: dict[str, Tensor] = {f"{BLOCK}.gate.weight": ones(4, HIDDEN)}
    said = refusal(tmp_path / "one", {**second, **router}, num_hidden_layers=2)
    assert said.startswith("model.layers.1.mlp.gate.weight is missing: layer 1 has no router")
    packed = np.zeros((HIDDEN // 8, 4), np.int32)  # GPTQ
    own: Tensor = packed if name.endswith("qweight") else ones(4, HIDDEN)
    both = {**second, **router, f"model.layers.1.mlp.{name}": own}
    opened(tmp_path / "both", both, num_hidden_layers=2)
    opened(tmp_path / "none", second, num_hidden_layers=2)


# ---- what only a note says -------------------------------------------------------------


def test_a_router_that_no_family_has(tmp_path: Path) -> None:
    embeddings = {"model.embed_tokens.weight": ones(16, HIDDEN)}
    (note,) = opened(tmp_path / "none", embeddings).notes
    assert note.startswith(
        "no layer has a router with a known name, such as model.layers.0.mlp.gate.weight: nothing"
    )
    for shape in ((4, HIDDEN), (HIDDEN, 4)):
        unknown = {f"{BLOCK}.chooser.weight": ones(*shape)}
        (note,) = opened(tmp_path / "unknown", unknown).notes
        assert f"; {BLOCK}.chooser.weight has the shape of one: nothing" in note
    known = {f"{BLOCK}.gate.weight": ones(4, HIDDEN)}
    assert opened(tmp_path / "known", known | embeddings).notes == []
    assert opened(tmp_path / "experts alone").notes == []


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("mlp.experts", True),
        ("experts", True),
        ("model.layers.0", True),
        ("model.layers.*.mlp.experts.*", True),
        ("re:.*mlp\\.experts.*", True),
        ("mlp.gate", False),
        ("shared_experts", False),
        ("layers.00", False),
        ("expert", False),
        ("model.layers.1", False),
        ("lm_head", False),
    ],
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore"])
def test_quantized_experts_that_config_excludes(
    key: str, pattern: str, said: bool, tmp_path: Path
) -> None:
    codes = np.full((HIDDEN, HIDDEN), 0x38, np.uint8)
    tensors = numbered(f"{BLOCK}.experts", random_weights(), encode=lambda _: fp8(codes))
    scales = {f"{name}_scale_inv": np.ones((1, 1), np.float32) for name in tensors}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], key: [pattern]}
    config = simple_config(quantization_config=quantization)
    notes = open_checkpoint(write_checkpoint(tmp_path, tensors | scales, config)).notes
    assert [note for note in notes if "is not quantized" in note] == (
        [
            f"quantization_config in config.json says that {pattern!r} is not quantized, but the "
            "experts are fp8-block (layer 0): engines that go by it load wrong weights"
        ]
        if said
        else []
    )


def test_numbered_and_stacked_experts_in_one_layer(tmp_path: Path) -> None:
    stacked = fused(f"{BLOCK}.experts", random_weights(), transposed=False)
    for name, tensor in stacked.items():
        message = refusal(tmp_path, {name: tensor})
        assert message == (
            f"{BLOCK}.experts.0.gate_proj.weight is of one expert, and {name} of all: the experts "
            f"of {BLOCK}.experts are stored in two ways"
        )


def test_an_exclusion_that_takes_for_ever_to_match(tmp_path: Path) -> None:
    """Patterns come from strangers: they are matched in bounded time."""
    codes = np.full((HIDDEN, HIDDEN), 0x38, np.uint8)
    tensors = numbered(f"{BLOCK}.experts", random_weights(), encode=lambda _: fp8(codes))
    scales = {f"{name}_scale_inv": np.ones((1, 1), np.float32) for name in tensors}
    quantization = {"quant_method": "fp8", "ignore": ["re:(.|.)*!$", "re:(x+x+)+y"]}
    config = simple_config(quantization_config=quantization | {"weight_block_size": [128, 128]})
    notes = open_checkpoint(write_checkpoint(tmp_path, tensors | scales, config)).notes
    assert not [note for note in notes if "is not quantized" in note]


@pytest.mark.parametrize(
    ("name", "said"),
    [("lm_head.qweight", False), ("lm_head.weight_packed", False), ("other.qweight", True)],
)
def test_a_quantized_head_is_a_head(name: str, said: bool, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": ones(64, HIDDEN),
        name: np.zeros((64, 32), np.int32),
    }
    notes = opened(tmp_path, tensors, tie_word_embeddings=False).notes
    assert any("no tensor is the head" in note for note in notes) == said
