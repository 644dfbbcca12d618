"""The weights that packed experts stand for, and how far they are from the source's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.evaluation import Matrices, Values
from ktconv.formats import PROJECTIONS, Format, folding, parse_tensor_name
from ktconv.model.matching import open_layers
from ktconv.runtime.layers.experts import quantized
from ktconv.source.settings import ModelSettings
from ktconv.system.arrays import F32
from ktconv.writer.manifest import read_manifest


def values_of_output(output: Path, layers: Sequence[int], settings: ModelSettings) -> Values:
    """Dequantized weights of the bytes that a conversion wrote."""
    found: dict[tuple[int, int], Matrices] = {}
    for layer, experts in open_layers(output, layers, settings).items():
        for expert in range(experts.count):
            streams = zip(PROJECTIONS, experts.loaded(expert), strict=True)
            found[layer, expert] = {p: one.values() for p, one in streams if one is not None}
    return found


def values_of_format(fmt: Format, source: Values) -> Values:
    """Dequantized weights of a format that quantize-cpu does not write: rounded to nearest."""
    return {
        key: {p: quantized(fmt, matrix).values for p, matrix in matrices.items()}
        for key, matrices in source.items()
    }


def weight_errors(
    source: Values, values: Values, folds: Mapping[tuple[int, int], F32] | None = None
) -> dict[str, float]:
    """||W' - W|| / ||W|| over all experts, by projection, and of all projections as "all".

    The factors of `folds` [I], by which rows of up were multiplied and columns of down divided, are
    undone first.
    """
    apart: dict[str, float] = defaultdict(float)
    norm: dict[str, float] = defaultdict(float)
    for key, matrices in source.items():
        there = values[key] if folds is None else _unfolded(values[key], folds[key])
        for projection, matrix in matrices.items():
            for name in (projection, "all"):
                difference = there[projection].astype(np.float64) - matrix
                apart[name] += float(np.square(difference).sum())
                norm[name] += float(np.square(matrix, dtype=np.float64).sum())
    return {name: math.sqrt(apart[name] / norm[name]) for name in sorted(norm)}


def _unfolded(matrices: Matrices, factors: F32) -> Matrices:
    up, down = matrices["up"] / factors[:, None], matrices["down"] * factors
    return {**matrices, "up": up, "down": down}


def recorded_folds(output: Path) -> dict[tuple[int, int], F32]:
    """The factors [I] of each layer and expert of a folded output, as its manifest records them."""
    manifest = read_manifest(output)
    assert manifest is not None
    parts: dict[tuple[int, int], dict[int, F32]] = defaultdict(dict)
    for name, record in manifest.tensors.items():
        tensor = parse_tensor_name(name)
        if tensor is not None and (tensor.proj, tensor.kind) == ("up", "weight"):
            rows = manifest.layers[tensor.layer]["intermediate_size"] // manifest.options["numa"]
            exponents = folding.decode(record["fold"], rows)
            parts[tensor.layer, tensor.expert][tensor.part] = folding.factors(exponents)
    return {key: np.concatenate([of[n] for n in sorted(of)]) for key, of in parts.items()}
