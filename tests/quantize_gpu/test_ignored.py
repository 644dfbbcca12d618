"""Which modules config.json lists as not quantized: engines find every linear layer of a model
either there or among the targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converting import read_json
from families import FAMILIES, build_model, write_family
from gpu import quantize

from ktconv.quantize_gpu.ignored import ignored_modules


def test_what_counts() -> None:
    """Weights of two and more dimensions; no norms, no biases, no scales."""
    tensors = {
        "model.embed_tokens.weight": (64, 8),
        "model.norm.weight": (8,),
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.gate.e_score_correction_bias": (4,),
        "model.layers.0.conv1d.weight": (8, 1, 4),
        "model.layers.0.dt_bias": (8, 8),
        "lm_head.weight": (64, 8),
        "lm_head.bias": (64,),
    }
    assert ignored_modules(tensors.items()) == [
        "lm_head", "model.embed_tokens", "model.layers.0.conv1d", "model.layers.0.mlp.gate",
    ]  # fmt: skip


def test_a_head_that_is_the_embeddings() -> None:
    """It has no tensor, yet it is a linear layer."""
    assert ignored_modules([("model.embed_tokens.weight", (64, 8))]) == [
        "lm_head", "model.embed_tokens",
    ]  # fmt: skip
    nested = ignored_modules([("language_model.lm_head.weight", (64, 8))])
    assert nested == ["language_model.lm_head"]


def test_layers_that_engines_join() -> None:
    """By both names; only where all parts are there."""
    tensors = [(f"layers.0.self_attn.{part}_proj.weight", (8, 8)) for part in "qkv"]
    found = ignored_modules(tensors)
    assert [name for name in found if name.endswith("qkv_proj")] == ["layers.0.self_attn.qkv_proj"]
    assert {name.removesuffix(".weight") for name, _ in tensors} < {*found}
    assert not any(name.endswith("qkv_proj") for name in ignored_modules(tensors[1:]))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_by_the_rule_of_compressed_tensors(
    name: str, torch: Any, tmp_path: Path
) -> None:
    """The library's own matcher and its own assignment of schemes, over all modules of the model:
    experts have the scheme, all other linear layers are ignored, none is unknown."""
    from ktconv.quantize_gpu.calibration_model import _take_experts_apart
    from ktconv.quantize_gpu.libraries import quiet

    write_family(name, tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "out", group_size=32)
    told = read_json(tmp_path / "out/config.json")["quantization_config"]
    with quiet():
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from compressed_tensors.utils.match import is_match

        model = build_model(name)
        _take_experts_apart(model)
        (group,) = told["config_groups"].values()
        experts, others = [], []
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                target = is_match(path, module, group["targets"])
                assert target != is_match(path, module, told["ignore"]), path
                (experts if target else others).append(path)
        apply_quantization_config(model, QuantizationConfig.model_validate(told))
    assert len(experts) % 12 == 0 and experts  # 4 experts of 3 matrices
    assert all(".experts." in path for path in experts)
    assert not any(".experts." in path for path in others)
    for path, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        assert (scheme is not None) == (path in experts), path
        if scheme is not None:
            assert (scheme.weights.num_bits, scheme.weights.group_size) == (4, 32)
