"""Counts as the file that sglang-kt reads to place experts by frequency.

    --kt-expert-placement-strategy frequency --init-expert-location FILE.pt

A dict that torch.save writes: `logical_count`, int64 [1, layers, experts]. Layers are all of the
model, by number; those without experts have zeros. The first dimension is summed up.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np

from ktconv.checkpoint.config import MAX_SIZE
from ktconv.errors import UsageError
from ktconv.stats.counts import NUM_LAYERS, Statistics
from ktconv.system.arrays import I64
from ktconv.system.files import write_durably

ENDING = ".pt"  # by which sglang-kt knows it


def logical_count(statistics: Statistics) -> I64:
    """Counts [1, layers, experts]. UsageError where the number of layers is not known, or layers
    have different numbers of experts, which this file cannot express."""
    layers = statistics.about.get(NUM_LAYERS)
    numbers = [layer.layer for layer in statistics.layers]
    if type(layers) is not int or not max(numbers) < layers <= MAX_SIZE:
        raise UsageError(
            "--placement needs the number of layers of the model, which is not recorded here",
            "give the model itself, or a --json report of this version",
        )
    experts = {layer.experts for layer in statistics.layers}
    if len(experts) > 1:
        raise UsageError(
            "--placement cannot express layers with different numbers of experts",
            f"the layers have {', '.join(map(str, sorted(experts)))}",
        )
    counts = np.zeros((1, layers, experts.pop()), np.int64)
    for layer in statistics.layers:
        counts[0, layer.layer] = layer.counts
    return counts


def write_placement(statistics: Statistics, path: Path) -> None:
    """Write FILE.pt. UsageError as `logical_count`, or without PyTorch."""
    counts = logical_count(statistics)
    try:
        import torch
    except ImportError:
        raise UsageError(
            "--placement needs torch, which is not installed", "pip install 'ktconv[model]'"
        ) from None
    buffer = BytesIO()
    torch.save({"logical_count": torch.from_numpy(counts)}, buffer)
    write_durably(path, buffer.getvalue(), path.absolute().parent)
