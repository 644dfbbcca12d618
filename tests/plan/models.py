"""Models and counts for the tests of plans."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from helpers.families import Tensor, bf16, numbered, random_weights, simple_config, write_checkpoint

from ktconv.stats.counts import LayerCounts, Statistics

HIDDEN = 128
OTHER_BYTES = 2 * 64 * HIDDEN  # of the embedding


def write_model(
    directory: Path,
    experts: Sequence[int] = (8, 8),
    inner: Sequence[int] = (128, 128),
    mtp: int = 0,
) -> Path:
    """A layer for each number of experts and intermediate size, the last `mtp` of them MTP."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": bf16(np.ones((64, HIDDEN)))}
    for index, sizes in enumerate(zip(experts, inner, strict=True)):
        weights = random_weights(HIDDEN, sizes[1], sizes[0], seed=index)
        tensors |= numbered(f"model.layers.{index}.mlp.experts", weights)
    lists: dict[str, Any] = {"num_experts": experts[0], "moe_intermediate_size": inner[0]}
    if len({*experts}) > 1 or len({*inner}) > 1:
        lists = {"num_experts": list(experts), "moe_intermediate_size": list(inner)}
    if mtp:
        lists["num_nextn_predict_layers"] = mtp
    config = simple_config(num_hidden_layers=len(experts) - mtp, hidden_size=HIDDEN, **lists)
    return write_checkpoint(directory, tensors, config)


def uneven(directory: Path) -> Path:
    """Layers of 4, 8 and (MTP) 4 experts, the second of them twice as wide."""
    return write_model(directory, (4, 8, 4), (128, 256, 128), mtp=1)


def write_counts(path: Path, counts: Mapping[int, Sequence[int]], **about: Any) -> Path:
    """What `ktconv stats --json` prints."""
    layers = [LayerCounts(n, sum(row), np.array(row)) for n, row in counts.items()]
    known = {"model": "m", "model_type": "qwen3_moe", "tokens": 10, "text": "prose.txt"}
    path.write_text(json.dumps(Statistics(layers, known | about).facts(None, None)))
    return path
