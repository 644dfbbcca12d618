"""Experts of tokens and their weights, from a router's logits; see kt_choose_experts."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check, expect_rows
from ktconv.native.pool import Pool, open_pool

SCORINGS = {
    "softmax": lib.KT_SOFTMAX,
    "sigmoid": lib.KT_SIGMOID,
    "sqrtsoftplus": lib.KT_SQRT_SOFTPLUS,
}
MAX_ROUTED: int = lib.KT_MAX_ROUTED  # logits of a token


class Router(Struct, frozen=True):
    """The fields of kt_router; `scoring` is one of SCORINGS, `jitter` None where there is none."""

    scoring: str
    top_k: int
    sinks: int = 0
    by_logits: bool = False
    groups: int = 1
    keep: int = 1
    group_score: int = 2
    renormalise: bool = True
    masked: float = -math.inf
    jitter: float | None = None
    p_norm: float = 1.0
    epsilon: float = 0.0
    least_sum: float = 0.0
    factor: float = 1.0


@lru_cache(maxsize=64)
def router_struct(router: Router, experts: int) -> Any:
    """A kt_router without arrays, to be copied: making one takes longer than routing a token."""
    fields = asdict(router) | {"experts": experts, "scoring": SCORINGS[router.scoring]}
    return ffi.new(
        "kt_router *", fields | {"jitter": -1.0 if router.jitter is None else router.jitter}
    )


def choose_experts(
    router: Router,
    logits: Array,
    *,
    correction: Array | None = None,
    expert_factor: Array | None = None,
    given: Array | None = None,
    pool: Pool | None = None,
) -> tuple[Array, Array]:
    """Ids int64 and weights float32, both [M, K], of logits float32 [M, E + sinks].

    `correction` and `expert_factor`: float32 [E]. `given`: int64 [M, K], experts that are only to
    be weighed. `pool`: its threads work, else the calling one. ValueError for others, and for what
    kt_choose_experts refuses.
    """
    tokens, experts = len(logits), logits.shape[1] - router.sinks
    c = ffi.new("kt_router *", router_struct(router, experts)[0])
    c.correction = _floats("correction", correction, (experts,))
    c.expert_factor = _floats("expert_factor", expert_factor, (experts,))
    ids = np.empty((tokens, router.top_k), np.int64)
    weights = np.empty((tokens, router.top_k), np.float32)
    status = lib.kt_choose_experts(
        c,
        ffi.NULL if pool is None else open_pool(pool),
        tokens,
        _floats("logits", logits, (tokens, experts + router.sinks)),
        _pointer(_IDS, "given", given, np.int64, ids.shape),
        ffi.cast(_IDS, ffi.from_buffer(ids)),
        ffi.cast(_FLOATS, ffi.from_buffer(weights)),
    )
    check(status)
    return ids, weights


_FLOATS, _IDS = ffi.typeof("float *"), ffi.typeof("int64_t *")


def _floats(what: str, array: Array | None, shape: tuple[int, ...]) -> Any:
    return _pointer(_FLOATS, what, array, np.float32, shape)


def _pointer(kind: Any, what: str, array: Array | None, dtype: Any, shape: tuple[int, ...]) -> Any:
    """NULL for None; ValueError for an array of another dtype or shape."""
    if array is None:
        return ffi.NULL
    expect_rows(what, array, dtype, shape)
    if not array.flags.aligned:
        raise ValueError(f"{what} must be aligned")
    return ffi.cast(kind, ffi.from_buffer(array))
