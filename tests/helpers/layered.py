"""A model of several MoE layers whose weights are random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from helpers.families import Tensor, bf16, numbered, random_weights, simple_config, write_checkpoint

HIDDEN, INNER, EXPERTS, LAYERS = 256, 128, 4, 4


def layered_model(directory: Path, layers: int = LAYERS, **changes: Any) -> Path:
    """qwen3_moe with `layers` layers; weights of a layer spread more than those before it, so that
    no two have the same errors."""
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        weights = random_weights(HIDDEN, INNER, EXPERTS, seed=layer)
        for stack in weights:
            stack *= np.exp2(np.floor(np.abs(stack) * layer)).astype(np.float32)
        where = f"model.layers.{layer}"
        tensors |= numbered(f"{where}.mlp.experts", weights)
        tensors[f"{where}.mlp.gate.weight"] = bf16(np.ones((EXPERTS, HIDDEN), np.float32))
    tensors["lm_head.weight"] = bf16(np.ones((16, HIDDEN), np.float32))
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    sizes["num_experts_per_tok"] = 2
    config = simple_config(**{**sizes, "num_hidden_layers": layers, **changes})
    return write_checkpoint(directory, tensors, config)
