"""Experts that are missing, surplus, contradictory or of a kind that we cannot read."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    Raw,
    Tensor,
    bf16,
    fp8,
    fused,
    numbered,
    random_weights,
    raw,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.source import Checkpoint, ModelSource, open_checkpoint

SOURCE = "model.layers.0.mlp.experts"
ONE = np.zeros((1,), np.float32)


def opened(tmp_path: Path, tensors: dict[str, Tensor], **config: Any) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path, tensors, simple_config(**config)))


def refusal(tmp_path: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, tensors, **config)
    assert caught.value.hint
    return str(caught.value)


def layer(index: int, seed: int = 0) -> dict[str, Tensor]:
    return numbered(f"model.layers.{index}.mlp.experts", random_weights(seed=seed))


def without(tensors: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {k: v for k, v in tensors.items() if not any(part in k for part in parts)}


# ---- completeness ------------------------------------------------------------------------


def test_missing_projection(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    message = refusal(tmp_path, without(tensors, ".3.up_proj"))
    assert f"{SOURCE}.3.up_proj.weight is missing" in message


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("expert", [0, 1, 3])
def test_missing_expert(tmp_path: Path, names: tuple[str, str, str], expert: int) -> None:
    tensors = without(numbered(SOURCE, random_weights(), names), f"experts.{expert}.")
    message = refusal(tmp_path, tensors)
    assert f"{SOURCE}.{expert}.{names[0]}.weight is missing" in message
    assert f"no expert {expert} of 0-3" in message


def test_experts_with_gaps(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """0, 1, 2, 5: as many as config.json says, but not the ones."""
    moved = {key.replace("experts.3", "experts.5"): value for key, value in tensors.items()}
    assert f"{SOURCE}.5." in refusal(tmp_path, moved)
    message = refusal(tmp_path, moved, num_experts=None)
    assert f"{SOURCE}.3.gate_proj.weight is missing" in message
    assert "no expert 3, 4 of 0-5" in message


@pytest.mark.parametrize(
    "key", ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"]
)
def test_expert_count(tmp_path: Path, tensors: dict[str, Tensor], key: str) -> None:
    config = {"num_experts": None, key: 2}
    assert f"is expert 3, but config.json has {key} 2" in refusal(tmp_path, tensors, **config)
    config = {"num_experts": None, key: 5}
    assert f"{SOURCE}.4.gate_proj.weight is missing" in refusal(tmp_path, tensors, **config)


def test_a_router_of_more_experts(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """Without a count in config.json nothing else shows that the last expert is missing."""
    router = f"{SOURCE.rpartition('.')[0]}.gate.weight"
    tensors = {**without(tensors, "experts.3."), router: bf16(np.ones((4, 128), np.float32))}
    message = refusal(tmp_path, tensors, num_experts=None, num_experts_per_tok=None)
    assert f"has 3 experts, but their router {router} has the shape [4, 128]" in message


@pytest.mark.parametrize("count", [1_000_001, 10**9, 2**70])
@pytest.mark.parametrize(
    "key",
    [
        "num_experts", "n_routed_experts", "num_hidden_layers", "num_nextn_predict_layers",
        "hidden_size", "moe_intermediate_size",
    ],
)  # fmt: skip
def test_absurd_sizes_end_at_once(
    tmp_path: Path, tensors: dict[str, Tensor], key: str, count: int
) -> None:
    config = {"num_experts": None, key: count}
    message = refusal(tmp_path, tensors, **config)
    assert message == f"config.json: {key} is {count}, beyond the limit of 1000000"


def test_many_missing_experts_are_not_listed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    config = simple_config(num_experts=1_000_000)
    written = write_checkpoint(tmp_path, tensors, config)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"no expert 4, 5, 6, 7, 8, 9, 10, 11, \.\.\. of"):
            open_checkpoint(written)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rule", [{}, {"first_k_dense_replace": -(10**9)}])
def test_many_missing_layers(
    tmp_path: Path, tensors: dict[str, Tensor], rule: dict[str, Any]
) -> None:
    message = refusal(tmp_path, tensors, num_hidden_layers=1_000_000, **rule)
    assert "layer 1 has no experts" in message
    assert "nor have 999,998 other layers" in message
    assert "(nor has 1 other layer)" in refusal(tmp_path, tensors, num_hidden_layers=3, **rule)


def test_expert_count_differs_between_layers(tmp_path: Path) -> None:
    tensors = layer(0) | without(layer(1), ".3.")
    message = refusal(tmp_path, tensors, num_experts=None, num_hidden_layers=2)
    assert "model.layers.1.mlp.experts has 3 experts, but model.layers.0" in message


def test_same_weight_twice(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    twice = "same weight under two names"
    for name, said in (("1.w1", twice), ("01.gate_proj", "has leading zeros")):
        extra = f"{SOURCE}.{name}.weight"
        message = refusal(tmp_path, {**tensors, extra: tensors[f"{SOURCE}.1.gate_proj.weight"]})
        assert said in message
        assert extra in message


# ---- shapes ------------------------------------------------------------------------------


def test_wrong_shape_of_one_tensor(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    name = f"{SOURCE}.2.down_proj.weight"
    tensors[name] = bf16(np.zeros((128, 64)))
    assert f"{name} has shape [128, 64], expected [128, 128]" in refusal(tmp_path, tensors)
    bare = {"hidden_size": None, "moe_intermediate_size": None}
    assert f"{name} has shape [128, 64], expected" in refusal(tmp_path, tensors, **bare)
    tensors[name] = bf16(np.zeros((128 * 128,)))
    assert f"{name} has shape [16384]" in refusal(tmp_path, tensors, **bare)


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
def test_config_contradicts_all_shapes(
    tmp_path: Path, tensors: dict[str, Tensor], key: str
) -> None:
    assert f"{key} 96" in refusal(tmp_path, tensors, **{key: 96})


def test_expert_size_of_its_own_key(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    assert opened(tmp_path, tensors, intermediate_size=999).layers
    assert opened(tmp_path, tensors, moe_intermediate_size=None, intermediate_size=128).layers
    message = refusal(tmp_path, tensors, moe_intermediate_size=None, intermediate_size=999)
    assert "intermediate_size 999" in message
    # With one size per modality it is one of them; the dense size says nothing then.
    assert opened(tmp_path, tensors, moe_intermediate_size=[128, 2], intermediate_size=999).layers
    message = refusal(tmp_path, tensors, moe_intermediate_size=[1, 2], intermediate_size=999)
    assert "config.json has hidden_size 128 and moe_intermediate_size 1" in message


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        ((4, 128, 128), (4, 128, 128)),  # two squares
        ((4, 256, 128), (4, 64, 128)),
        ((4, 256, 128), (3, 128, 128)),
        ((256, 128), (128, 128)),
        ((4, 0, 0), (4, 0, 0)),
    ],
)
def test_fused_shapes_that_fit_nothing(
    tmp_path: Path, gate_up: tuple[int, ...], down: tuple[int, ...]
) -> None:
    tensors: dict[str, Tensor] = {
        f"{SOURCE}.gate_up_proj": bf16(np.zeros(gate_up)),
        f"{SOURCE}.down_proj": bf16(np.zeros(down)),
    }
    message = refusal(tmp_path, tensors)
    assert f"{SOURCE}.gate_up_proj {list(gate_up)}" in message
    assert "fit neither [4, 256, 128] + [4, 128, 128] nor [4, 128, 256]" in message
    bare = {"hidden_size": None, "moe_intermediate_size": None, "num_experts": None}
    assert "fit neither [E, 2I, H] + [E, H, I] nor" in refusal(tmp_path, tensors, **bare)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_size": 96}, "hidden size 128, but config.json has hidden_size 96"),
        ({"moe_intermediate_size": 96}, "has intermediate size 128, but"),
        ({"num_experts": 8}, "expert count 4, but config.json has num_experts 8"),
    ],
)
def test_fused_against_config(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    tensors = fused(SOURCE, random_weights(), transposed=False)
    assert reason in refusal(tmp_path, tensors, **config)


def test_fused_scale_without_its_weight(tmp_path: Path) -> None:
    tensors = fused(SOURCE, random_weights(), transposed=False)
    tensors[f"{SOURCE}.down_proj_scale_inv"] = tensors.pop(f"{SOURCE}.down_proj")
    message = refusal(tmp_path, tensors)
    assert f"{SOURCE}.down_proj is missing, although {SOURCE}.down_proj_scale_inv" in message


def test_fused_half(tmp_path: Path) -> None:
    tensors = fused(SOURCE, random_weights(), transposed=False)
    message = refusal(tmp_path, without(tensors, "down_proj"))
    assert f"{SOURCE}.down_proj is missing" in message
    message = refusal(tmp_path, without(tensors, "gate_up"))
    assert f"{SOURCE}.gate_up_proj is missing" in message


# ---- encodings ---------------------------------------------------------------------------

I32 = np.zeros((2, 2), np.int32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"1.up_proj.bias": ONE}, "1.up_proj.bias (F32 [1]) is no bias of its weight"),
        ({"1.up_proj.bias": np.ones(128, np.int32)}, "1.up_proj.bias (I32 [128]) is no bias"),
        ({"1.up_proj.qweight": I32}, "1.up_proj.qweight are two ways to store one weight"),
        ({"1.up_proj.qzeros": I32}, "1.up_proj.weight is BF16 and needs none"),
        ({"1.up_proj.weight_packed": I32}, "1.up_proj.weight_packed are two ways to store"),
        ({"1.up_proj.weight_scale": ONE}, "1.up_proj.weight is BF16 and needs none"),
        ({"1.up_proj.input_scale": ONE}, "1.up_proj.weight is BF16 and needs none"),
        ({"1.up_proj.scale": ONE}, "1.up_proj.weight is BF16 and needs none"),
        (
            {"1.up_proj.odd": ONE},
            "1.up_proj.odd (F32) is not a known companion of an expert weight",
        ),
        ({"1.up_proj": ONE}, "1.up_proj (F32 [1]) is not a known tensor of numbered experts"),
        ({"1.gate_up_proj.weight": ONE}, "1.gate_up_proj.weight are the same weight under two"),
        ({"1.up_proj.weight_scale_inv": ONE}, "1.up_proj.weight is BF16 and needs none"),
        (
            {"gate_up_proj": ONE},
            "experts.gate_up_proj of all: the experts of model.layers.0.mlp.experts are stored in",
        ),
        ({"1x.up_proj.weight": ONE}, "experts.1x.up_proj.weight"),
        (
            {"1.up_proj.weight": np.zeros((128, 128), np.int8)},
            "weight is I8, but it has no scale",
        ),
        ({"1.up_proj.weight": np.zeros((128, 128))}, "1.up_proj.weight has dtype F64"),
        ({"1.up_proj.weight": Raw("F8_E5M2", (1,), b"0")}, "has dtype F8_E5M2"),
        (
            {"1.up_proj.weight": fp8(np.zeros((128, 128), np.uint8))},
            "is F8_E4M3, but it has no scale",
        ),
    ],
)
def test_unsupported_among_numbered(
    tmp_path: Path, tensors: dict[str, Tensor], change: dict[str, Tensor], reason: str
) -> None:
    changed = {f"{SOURCE}.{rest}": tensor for rest, tensor in change.items()}
    message = refusal(tmp_path, {**tensors, **changed})
    assert reason in message
    assert any(name in message for name in changed)


def test_scale_without_its_weight(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors = without(tensors, ".2.up_proj")
    tensors[f"{SOURCE}.2.up_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    assert f"{SOURCE}.2.up_proj.weight is missing" in refusal(tmp_path, tensors)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gate_up_proj_bias": ONE}, "gate_up_proj_bias is a bias of stacked experts, and nothing"),
        ({"down_proj_bias": ONE}, "down_proj_bias (F32 [1]) is no bias of its weight"),
        ({"down_proj_blocks": ONE, "down_proj_scales": ONE}, "down_proj_blocks are two ways to"),
        ({"gate_up_proj.input_scale": ONE}, "experts.gate_up_proj is BF16 and needs none"),
        ({"w13_weight": ONE}, "are two ways to store the same experts"),
        ({"w7_weight": ONE}, "experts.w7_weight (F32 [1]) is not a known way"),
        ({"gate_up_proj.weight": ONE}, "are the same weight under two names"),
        (
            {"gate_up_proj": np.zeros((4, 256, 128), np.uint8)},
            "is U8, but it has no scale",
        ),
    ],
)
def test_unsupported_among_fused(tmp_path: Path, change: dict[str, Tensor], reason: str) -> None:
    tensors = fused(SOURCE, random_weights(), transposed=False)
    changed = {f"{SOURCE}.{rest}": tensor for rest, tensor in change.items()}
    message = refusal(tmp_path, {**tensors, **changed})
    assert reason in message
    assert any(name in message for name in changed)


def test_matrices_may_differ_in_encoding(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    for expert in (0, 2):
        name = f"{SOURCE}.{expert}.down_proj.weight"
        tensors[name] = np.zeros(raw(tensors[name]).shape, np.float16)
    [found] = opened(tmp_path, tensors).layers
    assert found.encoding == "bf16+fp16"
    elements = [expert["down"].element.name for expert in found.experts]
    assert elements == ["F16", "BF16", "F16", "BF16"]


def test_layers_may_differ_in_encoding(tmp_path: Path) -> None:
    def half(values: Any) -> Tensor:
        return values.astype(np.float16)

    tensors = layer(0) | numbered("model.layers.1.mlp.experts", random_weights(), encode=half)
    layers = opened(tmp_path, tensors, num_hidden_layers=2).layers
    assert [found.encoding for found in layers] == ["bf16", "fp16"]


# ---- layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"first_k_dense_replace": 0},
        {"decoder_sparse_step": 1, "mlp_only_layers": []},
        {"mlp_layer_types": ["sparse"] * 3},
        {"mlp_layer_types": ["hash_moe", "moe", "sparse"]},
        {"moe_layers": [0, 1, 2]},
        {"moe_layers_enum": "0, 1,2"},
        {"moe_layer_freq": [1, 1, 1]},
        {"moe_layer_start_index": 0},
        {"moe_layer_start_index": [0, 2], "moe_layer_end_index": [1, 2]},
        {"moe_layer_interval": 1, "moe_layer_end_index": -1},
        {"expert_layer_period": 1, "expert_layer_offset": 0},
        {"interleave_moe_layer_step": 1},
        {"layers_block_type": ["moe", "moe", "moe"]},
        {"hybrid_override_pattern": "EEE"},
    ],
)
def test_moe_layer_without_experts(tmp_path: Path, config: dict[str, Any]) -> None:
    dense: dict[str, Tensor] = {"model.layers.1.mlp.gate_proj.weight": ONE}
    message = refusal(tmp_path, layer(0) | layer(2) | dense, num_hidden_layers=3, **config)
    assert "layer 1 has no experts, but config.json declares it as an MoE layer" in message


@pytest.mark.parametrize(
    "config",
    [
        {"first_k_dense_replace": 1},
        {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"mlp_layer_types": ["dense", "sparse"]},
        {"moe_layers": [1]},
        {"first_k_dense_replace": 1, "moe_layer_freq": 1},
        {"moe_layer_freq": [0, 1]},
        {"num_dense_layers": 1},
        {"moe_layers_enum": "1"},
        {"moe_layer_start_index": 1},
        {"moe_layer_start_index": [1, 1], "moe_layer_end_index": [1, 0]},
        {"moe_layer_interval": 2},
        {"expert_layer_period": 2, "expert_layer_offset": 1},
        {"interleave_moe_layer_step": 2},
        {"layers_block_type": ["mamba", "moe"]},
        {"hybrid_override_pattern": "ME"},
    ],
)
def test_dense_layers_by_config(tmp_path: Path, config: dict[str, Any]) -> None:
    found = opened(tmp_path, layer(1), num_hidden_layers=2, **config)
    assert [layer.index for layer in found.layers] == [1]
    assert found.notes == []
    message = refusal(tmp_path, layer(0) | layer(1), num_hidden_layers=2, **config)
    assert f"layer 0 has experts ({SOURCE}), but " in message
    assert any(
        f"but {key} in config.json declares it as a dense layer" in message for key in config
    )


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"first_k_dense_replace": 2, "moe_layer_freq": 1}, "first_k_dense_replace"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, "moe_layer_freq"),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 1}, "mlp_only_layers"),
        ({"mlp_only_layers": [], "decoder_sparse_step": 3}, "decoder_sparse_step"),
        ({"first_k_dense_replace": 10**30}, "first_k_dense_replace"),
        ({"moe_layer_end_index": 0}, "moe_layer_end_index"),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 0}, "moe_layer_interval"),
        ({"expert_layer_period": 2, "expert_layer_offset": 0}, "expert_layer_period"),
        ({"interleave_moe_layer_step": 2}, "interleave_moe_layer_step"),
        ({"hybrid_override_pattern": "E*"}, "hybrid_override_pattern"),
        ({"moe_layers_enum": "1"}, "moe_layers_enum"),
    ],
)
@pytest.mark.parametrize("count", [2, None])
def test_dense_layer_with_experts(
    tmp_path: Path, config: dict[str, Any], key: str, count: int | None
) -> None:
    """The key that makes it dense is named, and what to do."""
    sizes = simple_config(num_hidden_layers=count, **config)
    written = write_checkpoint(tmp_path, layer(0) | layer(1), sizes)
    with pytest.raises(CheckpointError, match=f"but {key} in config.json") as caught:
        open_checkpoint(written)
    assert f"correct {key}" in str(caught.value.hint)


def test_mtp_layers_are_not_concerned_by_dense_keys(tmp_path: Path) -> None:
    tensors = {**layer(0), **layer(1), "model.layers.1.eh_proj.weight": ONE}
    found = opened(tmp_path, tensors, num_hidden_layers=1, mlp_layer_types=["sparse"])
    assert [layer.is_mtp for layer in found.layers] == [False, True]


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_layer_gap_without_config_keys(tmp_path: Path, absent: int) -> None:
    """Without a key that names dense layers, a layer is dense if it has an ordinary MLP."""
    tensors: dict[str, Tensor] = {}
    for index in {0, 1, 2} - {absent}:
        tensors |= layer(index)
    tensors[f"model.layers.{absent}.mlp.gate.weight"] = ONE  # a router is no MLP
    message = refusal(tmp_path, tensors, num_hidden_layers=3)
    assert f"layer {absent} has no experts, and no dense MLP either" in message
    tensors[f"model.layers.{absent}.mlp.down_proj.weight"] = ONE
    assert len(opened(tmp_path, tensors, num_hidden_layers=3).layers) == 2


def test_layer_beyond_the_config(tmp_path: Path) -> None:
    tensors = layer(0) | layer(1)
    message = refusal(tmp_path, tensors)
    assert (
        "model.layers.1.mlp.experts is layer 1, but config.json has num_hidden_layers 1" in message
    )
    declared = opened(tmp_path, tensors, num_nextn_predict_layers=1)
    assert [layer.is_mtp for layer in declared.layers] == [False, True]
    marked = opened(tmp_path, {**tensors, "model.layers.1.eh_proj.weight": ONE})
    assert [layer.is_mtp for layer in marked.layers] == [False, True]


def test_declared_mtp_layer_is_absent(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    [note] = opened(tmp_path, tensors, num_nextn_predict_layers=1).notes
    assert "declares 1 MTP layer, but the checkpoint has experts of 0" in note


def test_two_stacks_of_one_layer(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    other = numbered("talker.model.layers.0.mlp.experts", random_weights())
    message = refusal(tmp_path, tensors | other)
    assert f"towers model, talker ({SOURCE}, talker.model.layers.0.mlp.experts), and" in message
    mtp = numbered("mtp.layers.0.mlp.experts", random_weights())
    message = refusal(tmp_path, layer(0) | layer(1) | mtp, num_nextn_predict_layers=1)
    assert "both claim to be layer 1" in message


def test_mtp_index_needs_the_layer_count(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    mtp = numbered("mtp.layers.0.mlp.experts", random_weights())
    message = refusal(tmp_path, tensors | mtp, num_hidden_layers=None)
    assert "mtp.layers.0.mlp.experts is an MTP layer" in message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("model.layers.0.some.experts.0.w1.weight", "some.experts.0.w1.weight"),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "shared_expert.up_proj.weight"),
        ("model.layers.0.moe_gate.weight", "moe_gate"),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("x", ""),
    ],
)
def test_no_moe_layer(tmp_path: Path, name: str, nearest: str) -> None:
    message = refusal(tmp_path, {name: ONE})
    assert "no MoE layer was found: looked for [prefix.]layers.<L>.(mlp|block_sparse_moe" in message
    assert nearest in message.partition("nearest keys are")[2]


def test_shared_experts_and_routers_are_other_tensors(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    others: dict[str, Tensor] = {
        "model.layers.0.mlp.gate.weight": ONE,
        "model.layers.0.mlp.gate.e_score_correction_bias": np.ones(4, np.float32),
        "model.layers.0.mlp.shared_expert.up_proj.weight": ONE,
        "model.layers.0.mlp.shared_experts.down_proj.weight": ONE,
        "model.embed_tokens.weight": ONE,
    }
    checkpoint = opened(tmp_path, tensors | others)
    assert {tensor.name for tensor in checkpoint.other_tensors} == set(others)
    assert checkpoint.notes == []


def test_experts_in_an_unknown_place_are_noted(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    checkpoint = opened(tmp_path, {**tensors, "vision.stages.0.experts.0.w.weight": ONE})
    assert "vision.stages.0.experts.0.w.weight" in checkpoint.notes[0]
    assert len(checkpoint.other_tensors) == 1


@pytest.mark.parametrize("number", ["00", "01", "007"])
def test_leading_zeros(tmp_path: Path, tensors: dict[str, Tensor], number: str) -> None:
    """No engine reads them, and `experts.01` could be beside `experts.1`."""
    padded = {
        name.replace(f"experts.{int(number)}.", f"experts.{number}."): one
        for name, one in tensors.items()
    }
    if int(number) > 3:
        padded = tensors | {f"{SOURCE}.{number}.gate_proj.weight": bf16(np.ones((1, 1)))}
    said = refusal(tmp_path, padded)
    assert f"{SOURCE}.{number}." in said
    assert said.endswith("has leading zeros in the number of its expert")


def test_numbered_experts_stored_in_out(tmp_path: Path) -> None:
    """Their shapes cannot be told from those of another config.json: a map says it."""
    weights = random_weights(256, 128)
    source = "model.layers.0.mlp.experts"
    turned = numbered(source, weights, encode=lambda one: bf16(one.T))
    model = write_checkpoint(
        tmp_path / "model", turned, simple_config(moe_intermediate_size=128, hidden_size=256)
    )
    with pytest.raises(CheckpointError, match=r"0\.gate_proj\.weight has shape") as caught:
        open_checkpoint(model)
    assert 'stored = "in-out" in a map' in (caught.value.hint or "")
    lines = [f'{one} = "model.layers.{{layer}}.mlp.experts.{{expert}}.{one}_proj"'
             for one in ("gate", "up", "down")]  # fmt: skip
    names = tmp_path / "names.toml"
    names.write_text("\n".join(['like = "qwen3_moe"', "[experts]", 'stored = "in-out"', *lines]))
    found = open_checkpoint(ModelSource(str(model), map=names)).layers[0].experts[1]["down"]
    assert (found.rows, found.cols, found.row_stride) == (256, 128, 1)
