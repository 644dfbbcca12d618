"""How near the scale search comes to the best scale that a row can have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from ktconv import native
from ktconv.formats import INT4, reference
from ktconv.model import load_model
from ktconv.model.sites import find_experts
from ktconv.system.arrays import F32

SHARES = np.linspace(
    0.2, 1.1, 900, dtype=np.float32
)  # of amax / 7, that are tried as a row's scale
_EACH = 8  # of so many matrices, one is measured


def print_limit(model: Path) -> None:
    """||W' - W|| / ||W|| of amax, of the search, and of the best of many scales per row."""
    apart = {"amax": 0.0, "search": 0.0, "best of many": 0.0}
    norm = 0.0
    for matrix in _matrices(model):
        norm += float(np.square(matrix, dtype=np.float64).sum())
        for rule in ("amax", "search"):
            apart[rule] += float(
                np.square(quantized(matrix, rule) - matrix, dtype=np.float64).sum()
            )
        apart["best of many"] += float(least_squares(matrix).sum())
    for rule, found in apart.items():
        print(f"{model.name}, {rule}: {math.sqrt(found / norm):.5f}")


def least_squares(matrix: F32) -> F32:
    """Squared error of each row under the best of SHARES, each with its own least-squares scale."""
    unit = np.abs(matrix).max(axis=1, keepdims=True) / INT4.traits.max_level
    least = np.full(len(matrix), np.inf, np.float32)
    for share in SHARES:
        step = np.where(unit > 0, unit * share, 1)
        codes = np.clip(np.rint(matrix / step), -INT4.traits.max_level, INT4.traits.max_level)
        squares = np.square(codes).sum(axis=1)
        scale = np.divide(
            (codes * matrix).sum(axis=1), squares, out=np.zeros_like(least), where=squares > 0
        )
        least = np.minimum(least, np.square(codes * scale[:, None] - matrix).sum(axis=1))
    return least


def quantized(matrix: F32, rule: str) -> F32:
    """What INT4 by the C library restores."""
    source = native.Matrix(matrix.view(np.uint8).reshape(-1), "F32", *matrix.shape)
    codes, scale = native.quantize(INT4.layout, source, native.Choice(rule))
    return reference.dequantize(INT4, codes, scale)


def _matrices(model: Path) -> Iterator[F32]:
    """Some of the experts' matrices [N, K]."""
    loaded, _ = load_model(model, "float32")
    matrices = (
        matrix.numpy()
        for site in find_experts(loaded).values()
        for expert in range(site.count)
        for matrix in site.own.matrices(expert).values()
    )
    return islice((np.ascontiguousarray(matrix) for matrix in matrices), None, None, _EACH)
