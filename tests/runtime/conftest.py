"""Layers to call, packed at random or converted from the example."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from ktconv.formats import FORMATS
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.layers import pack_experts
from ktconv.system.arrays import F32, I64

HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 6, 3
Batch = tuple[F32, I64, F32]


@cache  # the same experts in all tests
def matrices(index: int) -> Any:
    rng = np.random.default_rng([3, index])
    shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    return tuple(rng.standard_normal(s, np.float32) * np.float32(0.1) for s in shapes)


@pytest.fixture
def make_layer(pool: Pool) -> Callable[..., MoELayer]:
    """make_layer("int8", parts=2, here=[0, None, 2, ...]): random experts, None is not there."""

    def make(method: str = "int8", here: list[int | None] | None = None, **more: Any) -> MoELayer:
        there = list(range(EXPERTS)) if here is None else here
        return MoELayer(pack_experts(FORMATS[method], matrices, there, HIDDEN, INNER, **more), pool)

    return make


def batch(tokens: int = 5, seed: int = 0, top_k: int = TOP_K) -> Batch:
    """x, ids without repetition within a token, weights."""
    rng = np.random.default_rng([seed, tokens])
    x = rng.standard_normal((tokens, HIDDEN), np.float32)
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :top_k].astype(np.int64)
    return x, np.ascontiguousarray(ids), rng.random((tokens, top_k), np.float32)
