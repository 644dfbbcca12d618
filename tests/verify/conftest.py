"""A small model and its conversions, to damage copies of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.convert import convert
from helpers.families import Tensor, bf16, numbered, random_weights, simple_config, write_checkpoint

HIDDEN, INNER, EXPERTS, LAYERS = 256, 256, 3, 2


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two MoE layers, an embedding and two norms."""
    rng = np.random.default_rng(5)
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": bf16(rng.standard_normal((64, HIDDEN)))
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights = random_weights(HIDDEN, INNER, EXPERTS, seed=layer)
        tensors |= numbered(f"{prefix}.mlp.experts", weights)
        tensors[f"{prefix}.input_layernorm.weight"] = bf16(rng.standard_normal(HIDDEN))
    config = simple_config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_hidden_layers=LAYERS,
    )
    directory = tmp_path_factory.mktemp("verify") / "model"
    write_checkpoint(directory, tensors, config)
    return directory


@pytest.fixture(scope="session")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Conversions of `model`, each made once: converted("int4", 2), converted("int8", 1, ...)."""
    made: dict[tuple[str, int, str], Path] = {}

    def get(method: str = "int4", numa: int = 2, layout: str = "safetensors") -> Path:
        key = method, numa, layout
        if key not in made:
            made[key] = tmp_path_factory.mktemp("converted") / "out"
            convert(model, made[key], method=method, numa=numa, layout=layout)
        return made[key]

    return get


@pytest.fixture
def damaged(converted: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a conversion, to be damaged."""

    def get(method: str = "int4", numa: int = 2, layout: str = "safetensors") -> Path:
        copy = tmp_path / f"copy-{method}-{numa}-{layout}"
        shutil.copytree(converted(method, numa, layout), copy)
        return copy

    return get
