"""Experts of tokens and their weights, from a router's logits; see kt_choose_experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check, expect_rows
from ktconv.native.pool import Pool, open_pool

SCORINGS = {
    "softmax": lib.KT_SOFTMAX,
    "sigmoid": lib.KT_SIGMOID,
    "sqrtsoftplus": lib.KT_SQRT_SOFTPLUS,
}
MAX_ROUTED: int = lib.KT_MAX_ROUTED  # logits of a token


@dataclass(frozen=True, slots=True)
class Router:
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
def _without_arrays(router: Router, experts: int) -> Any:
    """As kt_router, to be copied: making one takes longer than routing a token."""
    return ffi.new(
        "kt_router *",
        {
            "experts": experts,
            "sinks": router.sinks,
            "top_k": router.top_k,
            "scoring": SCORINGS[router.scoring],
            "by_logits": router.by_logits,
            "groups": router.groups,
            "keep": router.keep,
            "group_score": router.group_score,
            "renormalise": router.renormalise,
            "masked": router.masked,
            "jitter": -1.0 if router.jitter is None else router.jitter,
            "p_norm": router.p_norm,
            "epsilon": router.epsilon,
            "least_sum": router.least_sum,
            "factor": router.factor,
        },
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
    expect_rows("logits", logits, np.float32, (tokens, experts + router.sinks))
    c = ffi.new("kt_router *", _without_arrays(router, experts)[0])
    for name, array in (("correction", correction), ("expert_factor", expert_factor)):
        if array is not None:
            expect_rows(name, array, np.float32, (experts,))
            setattr(c, name, ffi.cast("float *", ffi.from_buffer(array)))
    if given is not None:
        expect_rows("given", given, np.int64, (tokens, router.top_k))
    ids = np.empty((tokens, router.top_k), np.int64)
    weights = np.empty((tokens, router.top_k), np.float32)
    status = lib.kt_choose_experts(
        c,
        ffi.NULL if pool is None else open_pool(pool),
        tokens,
        ffi.cast("float *", logits.ctypes.data),
        ffi.NULL if given is None else ffi.cast("int64_t *", given.ctypes.data),
        ffi.cast("int64_t *", ids.ctypes.data),
        ffi.cast("float *", weights.ctypes.data),
    )
    check(status)
    return ids, weights
