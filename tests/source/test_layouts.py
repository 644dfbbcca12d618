"""Every layout and place of experts that a family has on the hub, by hand-made checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    Tensor,
    Weights,
    bf16,
    fp8,
    fused,
    numbered,
    random_weights,
    read_matrix,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.source import PROJECTIONS, Checkpoint, open_checkpoint
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.verify.second_reader.names import SecondReader

pytestmark = pytest.mark.slow

HIDDEN, INNER = 128, 192
W = ("w1", "w3", "w2")

Made = Callable[[str, Weights], dict[str, Tensor]]


def plain(source: str, weights: Weights) -> dict[str, Tensor]:
    return numbered(source, weights)


def w(source: str, weights: Weights) -> dict[str, Tensor]:
    return numbered(source, weights, W)


def fc(source: str, weights: Weights) -> dict[str, Tensor]:
    return numbered(source, weights, ("fc1", "fc3", "fc2"))


def number_last(source: str, weights: Weights) -> dict[str, Tensor]:
    """experts.gate_proj.5.weight"""
    usual = (name.rsplit(".", 3) for name in numbered("x", weights))
    names = (f"{source}.{matrix}.{expert}.{part}" for _, expert, matrix, part in usual)
    return dict(zip(names, numbered("x", weights).values(), strict=True))


def halves(source: str, weights: Weights) -> dict[str, Tensor]:
    """experts.5.gate_up_proj.weight [2I, H]"""
    together = np.concatenate([weights.gate, weights.up], axis=1)
    found: dict[str, Tensor] = {}
    for expert, (gate_up, down) in enumerate(zip(together, weights.down, strict=True)):
        found[f"{source}.{expert}.gate_up_proj.weight"] = bf16(gate_up)
        found[f"{source}.{expert}.down_proj.weight"] = bf16(down)
    return found


def pair(gate_up: str, down: str, transposed: bool = False, interleaved: bool = False) -> Made:
    def made(source: str, weights: Weights) -> dict[str, Tensor]:
        if interleaved:
            both = np.stack([weights.gate, weights.up], axis=2).reshape(4, 2 * INNER, HIDDEN)
            return {f"{source}.{gate_up}": bf16(both), f"{source}.{down}": bf16(weights.down)}
        usual = fused(source, weights, transposed)
        names = (f"{source}.{gate_up}", f"{source}.{down}")
        return dict(zip(names, usual.values(), strict=True))

    return made


def apart(source: str, weights: Weights) -> dict[str, Tensor]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{source}.{n}.weight": bf16(one) for n, one in zip(names, weights, strict=True)}


def dbrx(source: str, weights: Weights) -> dict[str, Tensor]:
    rows = [weights.gate, weights.up, weights.down.transpose(0, 2, 1)]
    return {
        f"{source}.mlp.{name}": bf16(np.ascontiguousarray(one).reshape(-1, HIDDEN))
        for name, one in zip(("w1", "v1", "w2"), rows, strict=True)
    }


USUAL = {"num_hidden_layers": 3, "moe_intermediate_size": INNER}
# model_type: (where layer 2 is, how it is stored)
LAYOUTS: dict[str, tuple[str, Made]] = {
    "gemma4": ("model.language_model.layers.2.experts", pair("gate_up_proj", "down_proj")),
    "mistral_large4": ("layers.2.experts", w),
    "step3p5": ("model.layers.2.moe", apart),
    "granitemoe": (
        "model.layers.2.block_sparse_moe", pair("input_linear.weight", "output_linear.weight"),
    ),
    "jetmoe": ("model.layers.2.mlp", pair("input_linear.weight", "output_linear.weight")),
    "granitemoe_swa": (
        "model.layers.2.block_sparse_moe.experts", pair("gate_up_proj", "down_proj"),
    ),
    "aria_text": (
        "language_model.model.layers.2.mlp.experts", pair("fc1.weight", "fc2.weight", True),
    ),
    "inkling_mm_model": (
        "model.llm.layers.2.mlp.experts", pair("w13_weight", "w2_weight", interleaved=True),
    ),
    "inkling2": ("model.llm.layers.2.mlp.experts", pair("gate_up_proj", "down_proj")),
    "hy_v4": ("model.layers.2.mlp.experts", pair("w13_weight", "w2_weight")),
    "dots3_note_vision_encoder": ("vision_encoder.blocks.2.mlp.experts", fc),
    "dbrx": ("transformer.blocks.2.ffn.experts", dbrx),
    "deepseek_v4": ("layers.2.ffn.experts", w),
    "kimi_k3": ("language_model.model.layers.2.block_sparse_moe.experts", w),
    "qwen3_5_moe": ("model.language_model.layers.2.mlp.experts", halves),
    "gpt_oss_like_names": ("model.layers.2.mlp.experts", number_last),
    "saved_by_mlx": ("model.layers.2.mlp.switch_mlp", apart),
    "lfm2_moe": ("model.layers.2.feed_forward.experts", w),
    "qwen3_omni_moe": ("thinker.model.layers.2.mlp.experts", plain),
}  # fmt: skip


def opened(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Checkpoint:
    sizes = {**USUAL, "mlp_layer_types": ["dense", "dense", "sparse"], **config}
    return open_checkpoint(write_checkpoint(directory, tensors, simple_config(**sizes)))


def refusal(directory: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(directory, tensors, **config)
    assert caught.value.hint
    return str(caught.value)


def assert_has(checkpoint: Checkpoint, weights: Weights, layer: int = 0) -> None:
    """By the usual reader and by the second one."""
    found = checkpoint.layers[layer]
    assert len(found.experts) == len(weights.gate)
    second = SecondReader(checkpoint, SourceReader(checkpoint.files, checkpoint.sources))
    for expert, matrices in enumerate(found.experts):
        for projection in PROJECTIONS:
            expected = getattr(weights, projection)[expert]
            np.testing.assert_array_equal(read_matrix(matrices[projection]), expected)
            again = second.expert(found, expert, projection)
            rows, cols = (range(size) for size in expected.shape)
            np.testing.assert_array_equal(again.values(rows, cols), expected)


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layout(model_type: str, tmp_path: Path) -> None:
    source, made = LAYOUTS[model_type]
    weights = random_weights(HIDDEN, INNER)
    tensors = made(source, weights)
    prefix = source.partition("2.")[0] + "2."
    others: dict[str, Tensor] = {
        f"{prefix}{name}": np.ones(3, np.float32)
        for name in (
            "mlp.gate_proj.weight", "shared_mlp.input_linear.weight", "share_expert.w1.weight",
            "mlp.shared_experts.shared_w13_weight", "router.proj.weight", "mlp.bias",
        )
    }  # fmt: skip
    checkpoint = opened(tmp_path, tensors | others, model_type=model_type, hidden_act="silu")
    [layer] = checkpoint.layers
    assert (layer.index, layer.source, layer.encoding) == (2, source, "bf16")
    assert (layer.hidden_size, layer.intermediate_size) == (HIDDEN, INNER)
    assert_has(checkpoint, weights)
    assert {tensor.name for tensor in checkpoint.other_tensors} == set(others)
    assert checkpoint.notes == []
    del tensors[list(tensors)[-1]]
    assert " is missing" in refusal(tmp_path, tensors, model_type=model_type)


@pytest.mark.parametrize("model_type", ["inkling_mm_model", "inkling2_text", "hy_v4"])
def test_interleaved_only_under_its_own_name(model_type: str, tmp_path: Path) -> None:
    """Inkling's w13_weight has gate and up in turns; unfolded by transformers it has not."""
    weights, source = random_weights(HIDDEN, INNER), "model.llm.layers.2.mlp.experts"
    turns = pair("w13_weight", "w2_weight", interleaved=model_type != "hy_v4")
    assert_has(opened(tmp_path, turns(source, weights), model_type=model_type), weights)
    message = refusal(tmp_path, turns(source, weights), model_type="a_copy")
    assert f"{source}.w13_weight has gate and up together, and nothing says" in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"w1": (768, 64)}, r"are not [E * I, H] each"),
        ({"w1": (4, 192, 128)}, r"are not [E * I, H] each"),
        ({"w1": (767, 128), "v1": (767, 128), "w2": (767, 128)}, "767 rows, which are no equal"),
        ({"w1": (760, 128), "v1": (760, 128), "w2": (760, 128)}, "has intermediate size 190"),
        ({"w2": None}, "ffn.experts.mlp.w2 is missing"),
        ({"w3": (768, 128)}, "mlp.w3 (BF16 [768, 128]) is not a known way"),
    ],
)
def test_rows_of_all_experts_that_do_not_fit(
    change: dict[str, tuple[int, ...] | None], reason: str, tmp_path: Path
) -> None:
    source = "transformer.blocks.2.ffn.experts"
    tensors = dbrx(source, random_weights(HIDDEN, INNER))
    for name, shape in change.items():
        tensors.pop(f"{source}.mlp.{name}", None)
        if shape is not None:
            tensors[f"{source}.mlp.{name}"] = bf16(np.ones(shape, np.float32))
    assert reason in refusal(tmp_path, tensors)


def test_rows_of_all_experts_need_their_number(tmp_path: Path) -> None:
    tensors = dbrx("transformer.blocks.2.ffn.experts", random_weights(HIDDEN, INNER))
    message = refusal(tmp_path, tensors, num_experts=None)
    assert "mlp.w1 [768, 128] has the rows of all experts, but config.json does not" in message


@pytest.mark.parametrize("count", [2, 8])
def test_rows_of_all_experts_cut_into_another_number(count: int, tmp_path: Path) -> None:
    """768 rows are as well 2 experts of 384 or 8 of 96: only the router has their number, by which
    they are also read where config.json has none."""
    block = "transformer.blocks.2.ffn"
    tensors = dbrx(f"{block}.experts", random_weights(HIDDEN, INNER))
    tensors[f"{block}.router.layer.weight"] = bf16(np.ones((4, HIDDEN), np.float32))
    message = refusal(tmp_path, tensors, num_experts=count, moe_intermediate_size=None)
    assert f"config.json's num_experts is stale: it is {count}, but the MoE" in message
    typed = {"model_type": "dbrx", "num_experts": None, "moe_intermediate_size": None}
    assert_has(opened(tmp_path, tensors, **typed), random_weights(HIDDEN, INNER))


def test_tensors_beside_the_experts(tmp_path: Path) -> None:
    """Laguna's and Muse-Spark's names lie under `experts.`, and belong to no expert."""
    source, ones = "model.layers.2.mlp.experts", np.ones(4, np.float32)
    beside: dict[str, Tensor] = {
        f"{source}.e_score_correction_bias": ones, f"{source}.post_expert_norm.weight": ones,
        "model.layers.2.self_attention.experts.input_linear.weight": ones,
    }  # fmt: skip
    weights = random_weights(HIDDEN, INNER)
    for tensors in (numbered(source, weights), fused(source, weights, transposed=False)):
        checkpoint = opened(tmp_path, tensors | beside, model_type="laguna")
        assert_has(checkpoint, weights)
        assert {tensor.name for tensor in checkpoint.other_tensors} == set(beside)
        assert checkpoint.notes == []
    assert "no MoE layer was found" in refusal(tmp_path, beside)


def test_one_expert_with_both_ways(tmp_path: Path) -> None:
    source, weights = "model.layers.2.mlp.experts", random_weights(HIDDEN, INNER)
    both = halves(source, weights)
    both[f"{source}.1.up_proj.weight"] = bf16(weights.up[1])
    message = refusal(tmp_path, both)
    assert "experts.1.gate_up_proj.weight and" in message
    mixed = {
        name: one
        for name, one in {**halves(source, weights), **numbered(source, weights)}.items()
        if (".1." in name) == ("gate_up" in name) or "down" in name
    }
    assert_has(opened(tmp_path, mixed), weights)
    wrong = halves(source, weights)
    wrong[f"{source}.2.gate_up_proj.weight"] = bf16(np.ones((INNER, HIDDEN), np.float32))
    assert "2.gate_up_proj.weight has shape [192, 128], expected [384, 128]" in refusal(
        tmp_path, wrong
    )


def test_quantized_by_mlx(tmp_path: Path) -> None:
    source, weights = "model.layers.2.mlp.switch_mlp", random_weights(HIDDEN, INNER)
    tensors = apart(source, weights)
    tensors[f"{source}.up_proj.weight"] = np.ones((4, INNER, HIDDEN // 8), np.int32)
    for part in ("scales", "biases"):
        tensors[f"{source}.up_proj.{part}"] = np.ones((4, INNER, 2), np.float16)
    assert "MLX quantization is not supported as an input" in refusal(tmp_path, tensors)


# ---- counts ------------------------------------------------------------------------------


def test_layers_with_different_numbers_of_experts(tmp_path: Path) -> None:
    """Where config.json lists them (Hunyuan); a token goes to at most as many."""
    weights = [random_weights(HIDDEN, INNER, experts=count, seed=count) for count in (4, 2, 3)]
    tensors: dict[str, Tensor] = {}
    for index, one in enumerate(weights):
        tensors |= numbered(f"model.layers.{index}.mlp.experts", one)
    lists = {"num_experts": [4, 2, 3], "moe_topk": [3, 2, 1], "mlp_layer_types": None}
    checkpoint = opened(tmp_path, tensors, **lists)
    for index, one in enumerate(weights):
        assert_has(checkpoint, one, index)
    message = refusal(tmp_path, tensors, **{**lists, "moe_topk": [3, 3, 1]})
    assert "moe_topk is 3, but a layer has 2 experts" in message
    message = refusal(tmp_path, tensors, **{**lists, "num_experts": [4, 3, 3]})
    assert (
        "layers.1.mlp.experts has experts 2, but config.json has num_experts [4, 3, 3]" in message
    )
    message = refusal(tmp_path, tensors, **{**lists, "num_experts": None})
    assert "layers.1.mlp.experts has 2 experts, but model.layers.0.mlp.experts has 4" in message
    message = refusal(tmp_path, tensors, **{**lists, "moe_intermediate_size": [INNER] * 4})
    assert "moe_intermediate_size lists 4 layers but num_hidden_layers is 3" in message


def test_identity_experts(tmp_path: Path) -> None:
    """LongCat's router has experts without weights; transformers saves a gate and up of them."""
    source, weights = "model.layers.2.mlp.experts", random_weights(HIDDEN, INNER)
    tensors = numbered(source, weights)
    spare: dict[str, Tensor] = {
        f"{source}.{n}.gate_proj.weight": bf16(weights.gate[0]) for n in (4, 5)
    }
    zero = {"model_type": "longcat_flash", "zero_expert_num": 2, "num_layers": 3,
            "num_hidden_layers": 6}  # fmt: skip
    checkpoint = opened(tmp_path, tensors | spare, **zero)
    assert_has(checkpoint, weights)
    assert {tensor.name for tensor in checkpoint.other_tensors} == set(spare)
    [note] = checkpoint.notes
    assert note.startswith("2 tensors are of experts that have no down projection")
    spare[f"{source}.4.down_proj.weight"] = bf16(weights.down[0])
    assert "is expert 4, but config.json has" in refusal(tmp_path, tensors | spare, **zero)
    assert_has(opened(tmp_path, tensors, **zero), weights)
    del tensors[f"{source}.3.up_proj.weight"]
    assert "experts.3.up_proj.weight is missing" in refusal(tmp_path, tensors, **zero)


def test_stacks_with_identity_experts(tmp_path: Path) -> None:
    """transformers stacks a gate and up of those, too, behind the others, and no down."""
    weights = random_weights(HIDDEN, INNER)
    spare = random_weights(HIDDEN, INNER, experts=2, seed=7)
    source = "model.layers.2.mlp.experts"
    both = [np.concatenate([one.gate, one.up], axis=1) for one in (weights, spare)]
    for turned in (False, True):
        gate_up, down = np.concatenate(both), weights.down
        if turned:
            gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
        tensors: dict[str, Tensor] = {
            f"{source}.gate_up_proj": bf16(np.ascontiguousarray(gate_up)),
            f"{source}.down_proj": bf16(np.ascontiguousarray(down)),
            "model.layers.2.mlp.router.classifier.weight": bf16(np.ones((6, HIDDEN), np.float32)),
        }
        zero = {"model_type": "longcat_flash", "num_layers": 3, "zero_expert_num": 2}
        checkpoint = opened(tmp_path, tensors, **zero)
        assert_has(checkpoint, weights)
        assert [one.name for one in checkpoint.other_tensors] == [list(tensors)[2]]
        message = refusal(tmp_path, tensors, **{**zero, "zero_expert_num": 1})
        assert "gate_up_proj" in message and "fit neither" in message


@pytest.mark.parametrize("model_type", ["gpt_oss", "new_moe", None])
def test_gpt_oss_as_lists_of_modules(model_type: str | None, tmp_path: Path) -> None:
    """As Unsloth saves it: gate_up_projs.3.weight with outputs in turns, down_projs.3.weight."""
    source, weights = "model.layers.2.mlp.experts", random_weights(HIDDEN, INNER)
    tensors: dict[str, Tensor] = {}
    for expert in range(4):
        both = np.stack([weights.gate[expert], weights.up[expert]], axis=1).reshape(-1, HIDDEN)
        tensors |= {
            f"{source}.gate_up_projs.{expert}.weight": bf16(both),
            f"{source}.gate_up_projs.{expert}.bias": np.arange(2 * INNER, dtype=np.float32),
            f"{source}.down_projs.{expert}.weight": bf16(weights.down[expert]),
            f"{source}.down_projs.{expert}.bias": np.ones(HIDDEN, np.float32),
        }
    if model_type != "gpt_oss":  # whose files have no such names: the order is not known
        assert "interleaved" in refusal(tmp_path, tensors, model_type=model_type)
        return
    checkpoint = opened(tmp_path, tensors, model_type=model_type)
    assert_has(checkpoint, weights)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    for first, projection in enumerate(PROJECTIONS[:2]):
        matrix = checkpoint.layers[0].experts[3][projection]
        bias = MatrixReader(reader, matrix).load_bias()
        np.testing.assert_array_equal(bias, np.arange(first, 2 * INNER, 2))
    del tensors[f"{source}.gate_up_projs.1.weight"], tensors[f"{source}.gate_up_projs.1.bias"]
    message = refusal(tmp_path, tensors, model_type=model_type)
    assert f"{source}.gate_up_projs.1.weight is missing" in message


# ---- the width of experts ------------------------------------------------------------------


@pytest.mark.parametrize("made", [plain, pair("gate_up_proj", "down_proj")])
def test_experts_narrower_than_the_model(made: Made, tmp_path: Path) -> None:
    """A key of config.json explains it, or a projection beside them; nothing else does."""
    source, weights = "model.layers.2.mlp.experts", random_weights(HIDDEN, INNER)
    tensors, wide = made(source, weights), {"hidden_size": 512}
    assert "512" in refusal(tmp_path, tensors, **wide)
    assert "moe_hidden_size 256" in refusal(tmp_path, tensors, **wide, moe_hidden_size=256)
    for key in ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size"):
        assert_has(opened(tmp_path, tensors, **wide, **{key: HIDDEN}), weights)
    for name in ("fc1_latent_proj", "routed_expert_down_proj", "pre_expert_proj"):
        beside: dict[str, Tensor] = {
            f"model.layers.2.mlp.{name}.weight": bf16(np.ones((HIDDEN, 512), np.float32))
        }
        checkpoint = opened(tmp_path, tensors | beside, **wide)
        assert_has(checkpoint, weights)
        assert [tensor.name for tensor in checkpoint.other_tensors] == list(beside)
        elsewhere = {key.replace("layers.2", "layers.1"): one for key, one in beside.items()}
        assert "512" in refusal(tmp_path, tensors | elsewhere, **wide)


# ---- multi-token prediction ----------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "mtp.0.ffn.experts", "mtp.layers.0.mlp.experts", "model.mtp.layers.0.mlp.experts",
        "model.mtp_layers.0.mlp.experts", "mtp_dspark.0.experts", "mtp.layers.0.mixer.experts",
        "model.mtp.layers.0.transformer_block.mlp.experts", "model.layers.3.mlp.experts",
        "model.mtp_block.0.mlp.experts",
    ],
)  # fmt: skip
def test_names_of_mtp_layers(source: str, tmp_path: Path) -> None:
    weights = [random_weights(HIDDEN, INNER, seed=seed) for seed in (1, 2)]
    tensors = numbered("model.layers.2.mlp.experts", weights[0]) | numbered(source, weights[1])
    checkpoint = opened(tmp_path, tensors, num_nextn_predict_layers=1)
    assert [(layer.index, layer.is_mtp) for layer in checkpoint.layers] == [(2, False), (3, True)]
    assert_has(checkpoint, weights[0])
    assert_has(checkpoint, weights[1], 1)


# ---- scales of stacked experts -------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 1, 1), (4,), (1,), ()])
def test_one_scale_for_each_stack(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Mistral-Small-4: a scale for every expert or for all, and scales of activations, which
    nothing here depends on."""
    source, codes = "model.layers.2.mlp.experts", np.full((4, 2 * INNER, HIDDEN), 0x38, np.uint8)
    scale = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    tensors: dict[str, Tensor] = {
        f"{source}.gate_up_proj": fp8(codes),
        f"{source}.down_proj": fp8(codes[:, :HIDDEN].repeat(3, axis=2)[:, :, :INNER]),
    }
    for name in ("gate_up_proj", "down_proj"):
        tensors[f"{source}.{name}_scale_inv"] = scale
        tensors[f"{source}.{name}_activation_scale"] = np.ones(shape, np.float32)
    checkpoint = opened(tmp_path, tensors, model_type="mistral4")
    assert checkpoint.layers[0].encoding == "fp8-tensor" and not checkpoint.other_tensors
    factors = np.broadcast_to(scale.reshape(-1), 4)  # 0x38 is 1
    ones = np.ones((4, INNER, HIDDEN), np.float32) * factors[:, None, None]
    assert_has(checkpoint, Weights(ones, ones, ones.transpose(0, 2, 1)))
