"""A small model like Nemotron-3 by hand: experts have up and down projections and no gate.

`latent`: the width of the experts' inputs and outputs, where two projections around the experts
change the width (Nemotron-3 Super).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from helpers.encoded import KINDS
from helpers.families import Raw, Tensor, bf16, write_checkpoint

HIDDEN, INNER, SHARED, EXPERTS, LAYERS, TOP_K = 256, 384, 128, 4, 2, 2
LIST, BLOCK, NORM = "backbone.layers", "mixer", "norm"
# (layer, expert, "up" or "down") -> the values [out, in] that the tensors stand for
Matrices = dict[tuple[int, int, Any], np.ndarray[Any, np.dtype[np.float32]]]


def exact(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Cut to what bf16 has as well."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def config(latent: int | None = None, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "model_type": "nemotron_h",
        "mlp_hidden_act": "relu2",
        "hidden_size": HIDDEN,
        "moe_latent_size": latent,
        "moe_intermediate_size": INNER,
        "moe_shared_expert_intermediate_size": SHARED,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_hidden_layers": LAYERS,
        "vocab_size": 64,
        **changes,
    }
    return {key: value for key, value in content.items() if value is not None}


def write_nemotron(
    directory: Path,
    kind: str | None = None,
    latent: int | None = None,
    stacked: bool = False,
    shards: int = 1,
    **changes: Any,
) -> tuple[Path, Matrices]:
    """The checkpoint and its experts' values. `kind`: of helpers.encoded.KINDS, bf16 for None;
    `changes`: of tensors, by name; None: it is missing."""
    rng = np.random.default_rng(7)
    width = latent or HIDDEN
    tensors: dict[str, Tensor] = {
        "backbone.embeddings.weight": bf16(rng.standard_normal((64, HIDDEN)))
    }
    matrices: Matrices = {}
    for layer in range(LAYERS):
        block = f"{LIST}.{layer}.{BLOCK}"
        for proj, shape in (("up", (INNER, width)), ("down", (width, INNER))):
            values = [_expert(tensors, f"{block}.experts.{e}.{proj}_proj", rng, shape, kind)
                      for e in range(EXPERTS)]  # fmt: skip
            matrices |= {(layer, e, proj): one for e, one in enumerate(values)}
            if stacked:
                for e in range(EXPERTS):
                    del tensors[f"{block}.experts.{e}.{proj}_proj.weight"]
                tensors[f"{block}.experts.{proj}_proj"] = bf16(np.stack(values))
        tensors |= _others(f"{LIST}.{layer}", block, rng, latent)
    tensors = {name: one for name, one in {**tensors, **changes}.items() if one is not None}
    quantization = dict(KINDS[kind].quantization) if kind else None
    content = config(latent, quantization_config=quantization or None)
    return write_checkpoint(directory, tensors, content, shards), matrices


def _expert(
    tensors: dict[str, Tensor],
    module: str,
    rng: np.random.Generator,
    shape: tuple[int, int],
    kind: str | None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    if kind is None:
        values = exact(rng.standard_normal(shape) / 16)
        parts: dict[str, Tensor] = {"weight": bf16(values)}
    else:
        parts, values = KINDS[kind].of(rng, *shape)
    tensors |= {f"{module}.{part}": one for part, one in parts.items()}
    return values


def _others(
    layer: str, block: str, rng: np.random.Generator, latent: int | None
) -> dict[str, Tensor]:
    def matrix(rows: int, cols: int) -> Raw:
        return bf16(rng.standard_normal((rows, cols)) / 16)

    found: dict[str, Tensor] = {
        f"{layer}.{NORM}.weight": bf16(rng.uniform(0.5, 2, HIDDEN)),
        f"{block}.gate.weight": matrix(EXPERTS, HIDDEN),
        f"{block}.gate.e_score_correction_bias": rng.uniform(-1, 1, EXPERTS).astype(np.float32),
        f"{block}.shared_experts.up_proj.weight": matrix(SHARED, HIDDEN),
        f"{block}.shared_experts.down_proj.weight": matrix(HIDDEN, SHARED),
    }
    if latent:
        found[f"{block}.fc1_latent_proj.weight"] = matrix(latent, HIDDEN)
        found[f"{block}.fc2_latent_proj.weight"] = matrix(HIDDEN, latent)
    return found
