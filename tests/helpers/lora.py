"""Adapters of small checkpoints, and the weights that they make of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

F32 = NDArray[np.float32]
Sides = tuple[F32, F32]  # A [r, inputs] and B [outputs, r]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def sides(rng: np.random.Generator, outputs: int, inputs: int, rank: int = 4) -> Sides:
    """Multiples of 1/256, so that every way to add their products gives the same."""
    a, b = (
        rng.integers(-15, 16, shape) / np.float32(256)
        for shape in ((rank, inputs), (outputs, rank))
    )
    return a.astype(np.float32), b.astype(np.float32)


def write_adapter(
    directory: Path, modules: Mapping[str, Sides], rank: int = 4, **settings: Any
) -> Path:
    """Write an adapter in PEFT's layout, by names of modules; alpha is twice the rank."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        f"{PREFIX}{module}.lora_{side}.weight": np.ascontiguousarray(one)
        for module, pair in modules.items()
        for side, one in zip("AB", pair, strict=True)
    }
    save_file(stored, directory / WEIGHTS)
    write_config(directory, rank, **settings)
    return directory


def write_config(directory: Path, rank: int = 4, **settings: Any) -> None:
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **settings}
    (directory / CONFIG).write_text(json.dumps(config))


def with_lora(weight: F32, pairs: Sequence[tuple[Sides, float]]) -> F32:
    """W + s B A of all pairs, with one rounding."""
    found = weight.astype(np.float64)
    for (a, b), scale in pairs:
        found = found + scale * (b.astype(np.float64) @ a.astype(np.float64))
    return found.astype(np.float32)
