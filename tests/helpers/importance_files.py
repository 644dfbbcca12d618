"""Files of importance, as `ktconv stats --importance` writes them, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktconv.source import Checkpoint
from ktconv.stats.importance import KIND
from ktconv.stats.importance_file import LayerImportance
from ktconv.stats.origin import Origin, Sizes, source_sha256


def importance_of(checkpoint: Checkpoint, seed: int = 0) -> dict[int, LayerImportance]:
    """Of all layers: mean squares that differ by orders of magnitude, and few tokens. Expert 0 has
    none, the last one many."""
    found = {}
    for layer in checkpoint.layers:
        rng, sizes = np.random.default_rng([seed, layer.index]), Sizes.of(layer)
        counts = rng.integers(1, 300, sizes.experts)
        counts[0], counts[-1] = 0, 50_000
        means = [
            (np.exp(rng.normal(0, 2, (sizes.experts, size))) * (counts > 0)[:, None])
            for size in (sizes.hidden, sizes.intermediate)
        ]
        gate_up, down = (one.astype(np.float32) for one in means)
        found[layer.index] = LayerImportance(gate_up, down, counts)
    return found


def write_importance(
    path: Path,
    layers: Mapping[int, LayerImportance],
    checkpoint: Checkpoint | None = None,
    model: str = "a/model",
) -> Path:
    """A file recorded on `checkpoint`; None: on some other."""
    from safetensors.numpy import save_file

    source = "0" * 64 if checkpoint is None else source_sha256(checkpoint)
    origin = Origin(model, source, "prose.txt", "1" * 64, 1000, "2" * 64)
    tensors: dict[str, Any] = {}
    for index, layer in layers.items():
        tensors[f"layers.{index}.gate_up"] = layer.gate_up
        tensors[f"layers.{index}.down"] = layer.down
        tensors[f"layers.{index}.counts"] = layer.counts
    save_file(tensors, path, origin.metadata(KIND))
    return path
