"""A few numbers of a model's router, by which a version of the same model is recognised.

Statistics are recorded on one version of a model and used for another: BF16 and FP8, safetensors
and GGUF. Their files differ, but the router hardly does, since it stays in high precision; and that
of another model with the same sizes has nothing in common with it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.names import router_tensors
from ktconv.source import Checkpoint, MoELayer
from ktconv.source.reading.tensors import SourceTensors
from ktconv.stats.origin import Origin, source_sha256
from ktconv.system.arrays import F32
from ktconv.system.text import path_text

_SIDE = 16  # rows and columns of the sample
# Correlation of two samples, of up to 256 numbers. Rounding to 8 bits leaves more than 0.99, and
# fine-tuning hardly less; that of unrelated models is within 0.3.
_SAME = 0.8
_LARGEST = 1e38  # whose squares float64 has

Sample = npt.NDArray[np.float64]


def router_sample(checkpoint: Checkpoint) -> str:
    """A JSON list of numbers of the last decoder layer's router, row by row and spread over it;
    empty where none is found, or it cannot be read as a matrix."""
    tensors = SourceTensors(checkpoint)
    for layer in reversed([one for one in checkpoint.layers if not one.is_mtp]):
        try:
            found = tensors.find(router_tensors(layer.source).weight)
            if found is None or len(found.shape) != 2:
                continue
            weights = tensors.matrix(found).values()
        except CheckpointError:  # of an encoding that is not read, or damaged
            continue
        return json.dumps([float(f"{value:.4g}") for value in _spread(weights, layer)])
    return ""


def _spread(weights: F32, layer: MoELayer) -> list[float]:
    """Elements in rows and columns at equal distances; rows are experts."""
    if weights.shape[0] != len(layer.experts) == weights.shape[1]:
        weights = weights.T
    rows, cols = (np.linspace(0, size - 1, _SIDE).astype(np.int64) for size in weights.shape)
    spread: list[float] = weights[np.ix_(np.unique(rows), np.unique(cols))].ravel().tolist()
    return spread


def notes_on_origin(path: Path, origin: Origin | None, checkpoint: Checkpoint) -> list[str]:
    """Notes on a file of statistics that was recorded on other files than `checkpoint`.

    Raises UsageError for one of another model, by its router: `source_sha256` does not cover
    weights, and a fine-tuned model can have the same headers.
    """
    if origin is None:
        return []
    where = f"{path_text(path)} was recorded on {origin.model}, not on {path_text(checkpoint.path)}"
    recorded, own = _parsed(origin.router), _parsed(router_sample(checkpoint))
    known = 0 < len(recorded) == len(own)
    if known and not _correlation(recorded, own) >= _SAME:
        raise UsageError(
            f"{where}, which is another model: their routers differ",
            "record statistics of this model, or of another version of it: ktconv stats MODEL",
        )
    if origin.source_sha256 == source_sha256(checkpoint):
        return []
    by_router = "by its router that is a version of the same model"
    return [f"{where}; {by_router if known else 'sizes agree, routers cannot be compared'}"]


def _parsed(text: str) -> Sample:
    """Empty for what is no sample: texts come from files of unknown origin."""
    none = np.zeros(0)
    try:
        values: Any = json.loads(text) if len(text) < 1 << 16 else None
    except (ValueError, RecursionError):
        return none
    if not isinstance(values, list):
        return none
    if not all(type(one) is float and abs(one) < _LARGEST for one in values):
        return none
    return np.array(values, np.float64)


def _correlation(one: Sample, other: Sample) -> float:
    """NaN if one has equal numbers only."""
    one, other = one - one.mean(), other - other.mean()
    sizes = math.sqrt(float(one @ one)) * math.sqrt(float(other @ other))
    return float(one @ other) / sizes if sizes else math.nan
