"""Writes a checkpoint with outliers in its experts' weights that computes the same function.

In each MoE layer, channel c of the norm in front is multiplied by a factor f_c, and column c of all
that reads it is divided by f_c: router, gate_proj and up_proj of routed and shared experts. In each
routed expert, row i of up_proj is multiplied by g_i and column i of down_proj divided by it.

Factors are powers of two, 2 ** round(spread * t) with t of Student's distribution with four degrees
of freedom. Products and sums then round as before, so that the function is the same bit for bit, in
bf16 as in float32, and bf16 weights stay bf16.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DEGREES = 4  # of freedom: heavy tails, but a finite variance
LARGEST = 6  # exponent; far from what bf16 or float32 cannot represent
INDEX = "model.safetensors.index.json"
# Two streams of random numbers per layer: one for its norm, one for each expert.
_NORM, _EXPERTS = 0, 1
_ROUTER = re.compile(r"(model\.layers\.(\d+))\.mlp\.gate\.weight")
_READER = re.compile(
    r"(gate|shared_expert_gate|(experts\.\d+|shared_experts?)\.(gate|up)_proj)\.weight"
)
_EXPERT = re.compile(r"experts\.(\d+)\.(up|down)_proj\.weight")


def factors(key: tuple[int, ...], size: int, spread: float) -> Tensor:
    """Powers of two, float32 [size]; equal keys give equal factors."""
    drawn = np.random.default_rng(key).standard_t(DEGREES, size)
    exponents = np.clip(np.rint(spread * drawn), -LARGEST, LARGEST)
    return torch.from_numpy(np.exp2(exponents).astype(np.float32))


def write_outliers(model: Path, output: Path, seed: int, spread: float) -> None:
    """Write the checkpoint `model`, with outliers, to the folder `output`, which must not exist.

    Takes checkpoints in safetensors with an index, whose experts have names as Qwen3-MoE's and
    DeepSeek-V3's. Raises ValueError for others.
    """
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    layers = {found[1]: int(found[2]) for found in map(_ROUTER.fullmatch, weight_map) if found}
    if not layers:
        raise ValueError(f"{model} has no routers named model.layers.L.mlp.gate.weight")
    output.mkdir(parents=True)
    for file in sorted(model.iterdir()):
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            changed = {n: _changed(n, t, layers, seed, spread) for n, t in tensors.items()}
            save_file(changed, output / file.name, {"format": "pt"})
        elif file.is_file():
            shutil.copyfile(file, output / file.name)


def _changed(name: str, tensor: Tensor, layers: dict[str, int], seed: int, spread: float) -> Tensor:
    """The tensor times its factors, in its own dtype."""
    prefix = ".".join(name.split(".")[:3])
    if prefix not in layers:
        return tensor
    layer, rest = layers[prefix], name.removeprefix(f"{prefix}.")
    if rest == "post_attention_layernorm.weight":
        return tensor * _of_norm(seed, layer, len(tensor), spread).to(tensor.dtype)
    inside = rest.removeprefix("mlp.")
    if _READER.fullmatch(inside):
        tensor = tensor / _of_norm(seed, layer, tensor.shape[1], spread).to(tensor.dtype)
    if found := _EXPERT.fullmatch(inside):
        key = (seed, layer, _EXPERTS, int(found[1]))
        if found[2] == "up":
            return tensor * factors(key, len(tensor), spread).to(tensor.dtype)[:, None]
        return tensor / factors(key, tensor.shape[1], spread).to(tensor.dtype)
    return tensor


def _of_norm(seed: int, layer: int, channels: int, spread: float) -> Tensor:
    return factors((seed, layer, _NORM), channels, spread)
