"""Every family as transformers writes it, and as it lies on the hub where that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    FAMILIES,
    HIDDEN,
    Weights,
    build_model,
    family,
    fused,
    numbered,
    random_weights,
    read_matrix,
    simple_config,
    write_checkpoint,
    write_family,
)
from helpers.paths import MODELS

from ktconv.source import PROJECTIONS, MoELayer, open_checkpoint


def assert_holds(layer: MoELayer, weights: Weights) -> None:
    assert len(layer.experts) == len(weights.gate)
    for expert, matrices in enumerate(layer.experts):
        for projection in PROJECTIONS:
            expected = getattr(weights, projection)[expert]
            np.testing.assert_array_equal(read_matrix(matrices[projection]), expected)


def weights_of_model(state: dict[str, Any], index: int) -> Weights:
    """The experts of layer `index` in a state dict (fused [E, 2I, H] in memory)."""
    prefix = next(key for key in state if f"layers.{index}.mlp.experts.gate_up_proj" in key)
    gate_up = state[prefix].float().numpy()
    gate, up = np.split(gate_up, 2, axis=1)
    return Weights(gate, up, state[prefix.replace("gate_up", "down")].float().numpy())


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_every_family_are_found(name: str, tmp_path: Path, torch: Any) -> None:
    write_family(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    expected = family(name)
    assert [layer.index for layer in checkpoint.layers] == list(expected.layers)
    state = build_model(name).state_dict()
    for layer in checkpoint.layers:
        assert (layer.hidden_size, layer.intermediate_size) == (HIDDEN, expected.intermediate)
        assert layer.encoding == "bf16"
        if not layer.is_mtp:
            assert_holds(layer, weights_of_model(state, layer.index))
    experts = {m.tensor.name for la in checkpoint.layers for e in la.experts for m in e.values()}
    others = {tensor.name for tensor in checkpoint.other_tensors}
    assert not experts & others
    assert all(".experts." not in other for other in others)


@pytest.mark.parametrize(("dtype", "encoding"), [("float16", "fp16"), ("float32", "fp32")])
def test_opening_a_family_in_other_dtypes(
    dtype: str, encoding: str, tmp_path: Path, torch: Any
) -> None:
    write_family("qwen3_moe", tmp_path, dtype)
    layer = open_checkpoint(tmp_path).layers[1]
    assert layer.encoding == encoding
    assert_holds(layer, weights_of_model(build_model("qwen3_moe", dtype).state_dict(), 1))


def test_opening_the_mtp_layer_of_deepseek_v3(tmp_path: Path, torch: Any) -> None:
    from safetensors.torch import load_file

    write_family("deepseek_v3", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert [layer.is_mtp for layer in checkpoint.layers] == [False, False, True]
    assert any("layer 3 is an MTP layer" in note for note in checkpoint.notes)
    stored = load_file(tmp_path / "model-mtp.safetensors")
    key = "model.layers.3.mlp.experts.2.up_proj.weight"
    matrix = checkpoint.layers[2].experts[2]["up"]
    np.testing.assert_array_equal(read_matrix(matrix), stored[key].float().numpy())
    others = {tensor.name for tensor in checkpoint.other_tensors}
    assert {"model.layers.3.eh_proj.weight", "model.layers.3.shared_head.head.weight"} <= others


@pytest.mark.parametrize(
    ("name", "layers", "mtp"),
    [("tiny-qwen3moe", [0, 1, 2, 3], 0), ("tiny-deepseekv3", [1, 2, 3], 1)],
)
def test_trained_model(name: str, layers: list[int], mtp: int) -> None:
    directory = MODELS / name
    if not directory.is_dir():
        pytest.skip(f"{name} is not on this machine")
    checkpoint = open_checkpoint(directory)
    assert [layer.index for layer in checkpoint.layers] == layers
    assert all(len(layer.experts) == 16 for layer in checkpoint.layers)
    assert len([note for note in checkpoint.notes if "MTP" in note]) == mtp
    values = read_matrix(checkpoint.layers[0].experts[15]["down"])
    assert values.shape == (256, 256)
    assert 0 < values.std() < 1


# ---- layouts that transformers reads but does not write any more ------------------------

W1 = ("w1", "w3", "w2")
HUB_LAYOUTS: dict[str, tuple[str, bool | tuple[str, str, str]]] = {
    # model_type: (source of layer 0, transposed or names of numbered experts)
    "qwen3_vl_moe": ("model.language_model.layers.0.mlp.experts", True),
    "qwen3_5_moe": ("model.language_model.layers.0.mlp.experts", False),
    "llama4": ("language_model.model.layers.0.feed_forward.experts", True),
    "mixtral": ("model.layers.0.block_sparse_moe.experts", W1),
    "kimi_k25": (
        "language_model.model.layers.0.mlp.experts",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "deepseek_v4": ("layers.0.ffn.experts", W1),
}


@pytest.mark.parametrize("model_type", HUB_LAYOUTS)
@pytest.mark.parametrize(("hidden", "inner"), [(128, 192), (256, 128), (128, 128)])
def test_hub_layout(model_type: str, hidden: int, inner: int, tmp_path: Path) -> None:
    """256, 128 is 2I = H, where one fused tensor is square; 128, 128 makes the other square."""
    source, style = HUB_LAYOUTS[model_type]
    weights = random_weights(hidden, inner)
    if isinstance(style, tuple):
        tensors = numbered(source, weights, style)
    else:
        tensors = fused(source, weights, transposed=style)
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": 4}
    text = {**sizes, "num_hidden_layers": 1}
    config = {"model_type": model_type, "hidden_size": 7, "text_config": text}
    write_checkpoint(tmp_path, tensors, config)
    [layer] = open_checkpoint(tmp_path).layers
    assert (layer.index, layer.source) == (0, source)
    assert (layer.hidden_size, layer.intermediate_size) == (hidden, inner)
    assert_holds(layer, weights)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("known_sizes", [True, False])
def test_fused_2i_equals_h(
    transposed: bool, suffix: str, known_sizes: bool, tmp_path: Path
) -> None:
    """The square gate_up_proj says nothing; down_proj beside it decides, config or not."""
    weights = random_weights(hidden=256, inner=128)
    tensors = fused("model.layers.0.mlp.experts", weights, transposed, suffix)
    sizes: dict[str, Any] = {"hidden_size": 256} if known_sizes else {"hidden_size": None}
    config = simple_config(model_type="never_heard_of", moe_intermediate_size=None, **sizes)
    [layer] = open_checkpoint(write_checkpoint(tmp_path, tensors, config)).layers
    assert_holds(layer, weights)


@pytest.mark.parametrize("source", ["mtp.layers.0.mlp.experts", "mtp.0.ffn.experts"])
def test_mtp_stack_of_its_own(source: str, tmp_path: Path) -> None:
    """mtp.layers.0 is not layer 0: it follows the decoder's layers."""
    layers = [random_weights(seed=seed) for seed in range(3)]
    tensors = numbered("model.layers.0.mlp.experts", layers[0])
    tensors |= numbered("model.layers.1.mlp.experts", layers[1])
    tensors |= numbered(source, layers[2])
    config = simple_config(num_hidden_layers=2)
    found = open_checkpoint(write_checkpoint(tmp_path, tensors, config)).layers
    assert [(layer.index, layer.is_mtp) for layer in found] == [(0, False), (1, False), (2, True)]
    for layer, weights in zip(found, layers, strict=True):
        assert_holds(layer, weights)
