"""The weights that packed experts stand for, and how far they are from the source's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.evaluation import Matrices, Values
from ktconv.formats import PROJECTIONS, Format
from ktconv.model.matching import open_layers
from ktconv.moe.experts import quantized
from ktconv.system.arrays import F32, Array


def values_of_output(output: Path, layers: Sequence[int], settings: Mapping[str, Any]) -> Values:
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


def weight_errors(source: Values, values: Values, folded: bool = False) -> dict[str, float]:
    """||W' - W|| / ||W|| over all experts, by projection, and of all projections as "all".

    In a `folded` output, rows of up and columns of down differ by factors from the source's: these
    are undone first.
    """
    apart: dict[str, float] = defaultdict(float)
    norm: dict[str, float] = defaultdict(float)
    for key, matrices in source.items():
        there = unfolded(matrices, values[key]) if folded else values[key]
        for projection, matrix in matrices.items():
            for name in (projection, "all"):
                difference = there[projection].astype(np.float64) - matrix
                apart[name] += float(np.square(difference).sum())
                norm[name] += float(np.square(matrix, dtype=np.float64).sum())
    return {name: math.sqrt(apart[name] / norm[name]) for name in sorted(norm)}


def unfolded(source: Matrices, values: Matrices) -> Matrices:
    """`values` with the factors undone that folding gave to rows of up and columns of down."""
    exponents = fold_exponents(source["up"], values["up"])
    factors = np.exp2(exponents / 8).astype(np.float32)
    up, down = values["up"] / factors[:, None], values["down"] * factors
    return {**values, "up": up, "down": down}


def fold_exponents(source: F32, values: F32) -> Array:
    """The integers e [rows] for which 2^(e/8) times the source's row is nearest to the other's.

    Rounding errors of a row change the projection by far less than a step of 2^(1/8).
    """
    products = np.einsum("nk,nk->n", source, values, dtype=np.float64)
    squares = np.einsum("nk,nk->n", source, source, dtype=np.float64)
    scale = np.divide(products, squares, out=np.ones_like(products), where=squares > 0)
    return np.rint(8 * np.log2(np.maximum(scale, 2.0**-16)))
