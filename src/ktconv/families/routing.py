"""A router at work: which experts a token goes to, and with what weights.

Used where a model's own code is not available. Everything is float32, as in most families' own
routers; a model that computes its logits in bf16 may choose differently between experts with nearly
equal scores. What follows the logits is kt_choose_experts of the C library.

    spec = router_of(config, layer)
    ids, weights = route(spec, x, gate)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import GROUP_SCORES, SCORINGS, RouterSpec
from ktconv.families.routers import check_experts
from ktconv.system.arrays import F32, I64


class Stored(Struct, frozen=True):
    """Arrays of a router in addition to its gate; None for those that its spec does not have."""

    bias: F32 | None = None  # [rows of the gate]
    correction: F32 | None = None  # [E]
    input_scale: F32 | None = None  # [H]
    scale: F32 | None = None  # [1]
    expert_scale: F32 | None = None  # [E]
    table: I64 | None = None  # [vocabulary, K]: experts of each token


def wanted(spec: RouterSpec) -> Mapping[str, bool]:
    """Whether `spec` has it, for each field of `Stored`."""
    return {
        "bias": spec.bias,
        "correction": spec.correction,
        "input_scale": spec.input_norm is not None,
        "scale": spec.stored_scale,
        "expert_scale": spec.expert_scale,
        "table": spec.by_token,
    }


PARTS: Mapping[str, str] = {  # of these fields, in messages
    "bias": "bias",
    "correction": "correction bias",
    "input_scale": "input scale",
    "scale": "scale",
    "expert_scale": "scale per expert",
    "table": "table of tokens",
}


def route(
    spec: RouterSpec,
    x: F32,
    weight: F32,
    stored: Stored | None = None,
    tokens: I64 | None = None,
) -> tuple[I64, F32]:
    """Experts of each token, best first, and their weights: int64 and float32 [M, K].

    x [M, H] is what goes into the router, weight [E, H] the gate; of its rows, the last ones
    belong to `spec.identity_experts`, and behind those to `spec.sinks`. The rest as in `choose`.
    """
    stored = stored or Stored()
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise UsageError(f"x {list(x.shape)} and a gate {list(weight.shape)} do not fit")
    _check_stored(spec, stored, {"bias": (len(weight),), "input_scale": (x.shape[1],)})
    if stored.table is not None:
        _check_ids(stored.table, len(weight) - spec.sinks)
    return choose(spec, _logits(spec, x, weight, stored), stored, tokens)


def choose(
    spec: RouterSpec,
    logits: F32,
    stored: Stored | None = None,
    tokens: I64 | None = None,
    pool: native.Pool | None = None,
) -> tuple[I64, F32]:
    """Experts of each token, best first, and their weights, int64 and float32 [M, K], by logits
    [M, E + sinks].

    Of `stored`, what made the logits is not looked at. tokens [M] are needed for a table only,
    whose experts come in its order. Of two equal scores the lower expert is chosen. `pool`: its
    threads work, else the calling one. Raises UsageError for arrays that do not fit each other,
    CheckpointError for ones that do not fit `spec`, and a spec that no router can have.
    """
    stored = stored or Stored()
    experts = logits.shape[1] - spec.sinks
    rule = _rule(spec, experts)
    _check_stored(
        spec,
        stored,
        {"correction": (experts,), "scale": (1,), "expert_scale": (experts,), "table": None},
    )
    given = None
    if stored.table is not None:
        _check_table(spec, stored.table, tokens, len(logits))
        given = np.ascontiguousarray(stored.table[tokens], np.int64)
        _check_ids(given, experts)
    return native.choose_experts(
        rule,
        np.ascontiguousarray(logits, np.float32),
        correction=_floats(stored.correction),
        expert_factor=_factors(stored, experts),
        given=given,
        pool=pool,
    )


@lru_cache(maxsize=64)
def _rule(spec: RouterSpec, experts: int) -> native.Router:
    """CheckpointError for a spec that no router with this number of experts can have."""
    check_experts(spec, experts - spec.identity_experts)
    _check_steps(spec, experts + spec.sinks)
    return native.Router(
        spec.scoring,
        spec.top_k,
        sinks=spec.sinks,
        by_logits=spec.by_logits,
        groups=spec.n_group,
        keep=spec.topk_group,
        group_score=1 + GROUP_SCORES.index(spec.group_score),
        renormalise=spec.renormalise and spec.jitter is None,  # whose weights are shares already
        masked=spec.masked,
        jitter=spec.jitter,
        p_norm=spec.p_norm,
        epsilon=spec.epsilon,
        least_sum=spec.least_sum,
        factor=spec.routed_scaling_factor,
    )


def _floats(array: F32 | None) -> F32 | None:
    return None if array is None else np.ascontiguousarray(array, np.float32)


def _factors(stored: Stored, experts: int) -> F32 | None:
    """Both scales as one factor for each expert."""
    if stored.scale is None:
        return _floats(stored.expert_scale)
    each = np.float32(1) if stored.expert_scale is None else stored.expert_scale
    return np.ascontiguousarray(np.broadcast_to(stored.scale * each, (experts,)), np.float32)


def _check_steps(spec: RouterSpec, logits: int) -> None:
    """CheckpointError for steps that are not known or do not go together, and for numbers outside
    their ranges."""
    for name, known in (("scoring", SCORINGS), ("group_score", GROUP_SCORES)):
        if getattr(spec, name) not in known:
            words = ", ".join(known)
            raise CheckpointError(f"{name} {getattr(spec, name)!r} of a router is none of {words}")
    if logits > native.MAX_ROUTED:
        raise CheckpointError(
            f"{logits} logits of a token are more than the {native.MAX_ROUTED} that are supported"
        )
    if spec.sinks and spec.scoring == "softmax":
        raise CheckpointError("a softmax router has no sinks", "sigmoid and sqrtsoftplus have")
    others = (spec.n_group > 1, spec.correction, spec.by_logits, spec.by_token, spec.sinks)
    if spec.jitter is not None and (spec.scoring != "softmax" or any(others)):
        raise CheckpointError(
            "sparsemixer chooses by softmax alone, without groups, a correction bias, a choice by "
            "logits, a table or sinks"
        )
    for name in ("jitter", "p_norm", "epsilon", "least_sum", "routed_scaling_factor", "masked"):
        value = getattr(spec, name)
        if value is not None and not _possible(name, value):
            raise CheckpointError(f"{name} of a router cannot be {value}")


def _possible(name: str, value: float) -> bool:
    if name == "masked" and value == -np.inf:
        return True
    if name in ("masked", "routed_scaling_factor"):
        return bool(np.isfinite(value))
    return value > 0 if name == "p_norm" else value >= 0


def _check_stored(
    spec: RouterSpec, stored: Stored, shapes: Mapping[str, tuple[int, ...] | None]
) -> None:
    parts = wanted(spec)
    for field, shape in shapes.items():
        needed, array = parts[field], getattr(stored, field)
        if needed != (array is not None):
            state = "has no" if needed else "must not have a"
            raise CheckpointError(f"the router {state} {PARTS[field]}")
        if array is not None and shape is not None and array.shape != shape:
            raise UsageError(f"the {PARTS[field]} {list(array.shape)} must be {list(shape)}")


def _check_table(spec: RouterSpec, table: I64, tokens: I64 | None, count: int) -> None:
    if table.ndim != 2 or table.shape[1] != spec.top_k:
        raise UsageError(f"the table of tokens {list(table.shape)} must be [tokens, {spec.top_k}]")
    if tokens is None or tokens.shape != (count,):
        raise UsageError("a table of tokens needs the token of each row of x")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(table):
        raise UsageError(f"tokens must be from 0 to {len(table) - 1}, as in the table")


def _check_ids(ids: I64, experts: int) -> None:
    """Check ids of all tokens of a table, or of those that are looked up."""
    if ids.size and not 0 <= ids.min() <= ids.max() < experts:
        raise CheckpointError(
            f"the table of tokens has experts from {ids.min()} to {ids.max()}, but there are "
            f"{experts}"
        )


def _logits(spec: RouterSpec, x: F32, weight: F32, stored: Stored) -> F32:
    x = x.astype(np.float32)
    if spec.input_norm is not None:
        squares = np.mean(x * x, axis=1, keepdims=True) + np.float32(spec.input_norm)
        x = x / np.sqrt(squares) * stored.input_scale * np.float32(x.shape[1] ** -0.5)
    logits = x @ weight.astype(np.float32).T
    if stored.bias is not None:
        logits += stored.bias
    logits *= np.float32(spec.logit_scale)
    if spec.softcap > 0:
        logits = np.tanh(logits / spec.softcap) * spec.softcap
    return np.asarray(logits, np.float32)
