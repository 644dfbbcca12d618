"""The router of an MoE layer in NumPy: which experts a token goes to, and with what weights.

Used where a model's own code is not available. Everything is float32, as in most families' own
routers; a model that computes its logits in bf16 may choose differently between experts with nearly
equal scores.

    spec = router_of(config, layer)
    ids, weights = route(spec, x, gate)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.families.config import family_of, text_section, top_k_of, value_of
from ktconv.families.family import SCORINGS, Family, GroupScore, Router, RouterSpec, Scoring
from ktconv.system.arrays import F32, I64, Array


class UnknownRouter(CheckpointError):
    """A router that is not in the table here, whether or not the checkpoint is sound."""


# What a row's `reads` name: by settings of table.KEYS, fields of a spec and types of their values.
SETTINGS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "scoring": ("scoring", str),
    "renormalise": ("renormalise", bool),
    "correction": ("correction", bool),
    "scale": ("routed_scaling_factor", float),
    "least sum": ("least_sum", float),
    "p-norm": ("p_norm", float),
    "logit scale": ("logit_scale", float),
    "logit softcap": ("softcap", float),
    "norm epsilon": ("input_norm", float),
    "router jitter": ("jitter", float),
    "zero experts": ("identity_experts", int),
    "shared experts": ("sinks", int),
}


@dataclass(frozen=True, slots=True)
class FoundRouter:
    """`inferred`: from what, where the family is not in the table; empty where it is."""

    spec: RouterSpec
    inferred: str = ""


def router_of(config: Mapping[str, Any], layer: int) -> RouterSpec:
    """The router of layer `layer`, from a model's config.json.

    Raises UnknownRouter where config.json names a router that is not known here or, for a family
    that is not in the table, does not say how it routes; CheckpointError where it contradicts
    itself or the family.
    """
    return find_router(config, layer).spec


def find_router(
    config: Mapping[str, Any], layer: int, corrected: bool | None = None
) -> FoundRouter:
    """As `router_of`, and from what the router is inferred where the family is not in the table.

    `corrected`: whether the checkpoint has a correction bias for this layer, where that is known.
    For such a family it decides what config.json leaves open.
    """
    text, row = text_section(config), family_of(config)
    name = str(value_of(text, "model type") or "").removesuffix("_text")
    routing, inferred = row.routing if row is not None else None, ""
    if isinstance(routing, str):
        raise UnknownRouter(f"the router of {name} is not supported: it {routing}", _HINT)
    if routing is None:
        routing, inferred = _inferred(name, text, corrected)
    _check_stated(name, text, routing, row)
    top_k = top_k_of(config, layer)
    if top_k is None:
        raise CheckpointError("config.json does not say how many experts are chosen for a token")
    spec = replace(_read(routing, text, row, layer), top_k=top_k)
    if "hash layers" in routing.reads and _is_hashed(text, layer, corrected):
        spec = replace(spec, by_token=True, correction=False)
    return FoundRouter(_checked(spec, value_of(text, "experts")), inferred)


_HINT = "load the model with transformers, which implements its router"


def _inferred(name: str, text: Mapping[str, Any], corrected: bool | None) -> tuple[Router, str]:
    """For a family that is not in the table: by the keys that such models share, and the tensors.

    Softmax only where the checkpoint has no correction bias, or config.json says softmax.
    """
    shown = {key: text[key] for key in _keys("method", "scoring", "renormalise") if key in text}
    method, scoring = value_of(text, "method"), value_of(text, "scoring")
    if not any(value is not None for value in shown.values()) and not corrected:
        raise UnknownRouter(
            f"config.json does not describe the router of {name or 'this model'}", _HINT
        )
    if scoring not in (None, *SCORINGS):
        raise UnknownRouter(f"config.json has the unknown router score function {scoring!r}", _HINT)
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        raise UnknownRouter(f"config.json has the unknown top-k method {method!r}", _HINT)
    if method == "noaux_tc" and scoring == "softmax":
        raise CheckpointError("config.json contradicts itself: noaux_tc with softmax", _HINT)
    corrected = bool(corrected) or method == "noaux_tc"
    if scoring is None:
        scoring = "sigmoid" if corrected else "softmax"
    rule: GroupScore = "max" if method == "group_limited_greedy" else "top2"
    spec = RouterSpec(scoring, correction=corrected, group_score=rule)
    reads = ("renormalise", "groups", "scale")
    from_what = [f"{key} {value!r:.40}" for key, value in shown.items() if value is not None]
    if corrected:
        from_what.append("a correction bias")
    return Router(spec, frozenset(reads)), " and ".join(from_what)


def _keys(*settings: str) -> list[str]:
    return [key for setting in settings for key in table.FAMILIES.keys(setting)]


def _check_stated(name: str, text: Mapping[str, Any], router: Router, row: Family | None) -> None:
    """CheckpointError or UnknownRouter if config.json contradicts the family's router."""
    stated, scoring = value_of(text, "scoring", row), router.spec.scoring
    if "scoring" in router.reads:
        if stated not in (None, *SCORINGS):
            raise UnknownRouter(
                f"config.json has the unknown router score function {stated!r}", _HINT
            )
    elif stated in SCORINGS and stated != scoring:
        raise CheckpointError(
            f"config.json contradicts itself: {name} scores by {scoring}, not {stated}",
            "check that config.json belongs to this checkpoint",
        )
    method = value_of(text, "method")
    if router.methods is not None and method not in (None, *router.methods):
        raise UnknownRouter(f"{name} does not have the top-k method {method!r}", _HINT)
    for setting in router.never:
        if value_of(text, setting):
            key = next(key for key in table.FAMILIES.keys(setting) if text.get(key))
            raise UnknownRouter(f"{name} with {key} is not supported", _HINT)


def _read(router: Router, text: Mapping[str, Any], row: Family | None, layer: int) -> RouterSpec:
    """The family's spec with what it reads from config.json."""
    found: dict[str, Any] = {}
    for setting in router.reads & SETTINGS.keys():
        field, kind = SETTINGS[setting]
        value = _of_layer(value_of(text, setting, row), layer)
        if value is not None and (value is not False or kind is bool):  # false: there is none
            found[field] = kind(value)
    norms = (text.get(key, 1) for key in _keys("p-norm"))
    if "p-norm" in router.reads and any(norm in (None, False) for norm in norms):
        found["renormalise"] = False
    # A greedy choice looks at no groups, even where config.json has a number of them.
    grouped = (
        router.spec.group_score == "top2" or value_of(text, "method") == "group_limited_greedy"
    )
    if "groups" in router.reads and grouped:
        for key in ("n_group", "topk_group"):
            if value_of(text, key, row) is not None:
                found[key] = value_of(text, key, row)
    return replace(router.spec, **found)


def _of_layer(value: Any, layer: int) -> Any:
    """The value for `layer` in a list with one for each; None if the list is too short."""
    if not isinstance(value, list):
        return value
    return value[layer] if layer < len(value) else None


_HASH_LAYERS = 3  # of DeepSeek-V4, where config.json does not say


def _is_hashed(text: Mapping[str, Any], layer: int, corrected: bool | None) -> bool:
    """Whether this layer's experts follow from the token alone; then it has no correction bias."""
    kinds = value_of(text, "kind of each layer")
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "hash_moe"
    first = value_of(text, "hash layers")
    if first is None and corrected is not None:
        return not corrected
    return layer < (_HASH_LAYERS if first is None else int(first))


def _checked(spec: RouterSpec, experts: Any) -> RouterSpec:
    """CheckpointError unless the numbers fit each other and the number of experts, if known."""
    numbers = (spec.top_k, spec.n_group, spec.topk_group)
    if any(type(number) is not int or number < 1 for number in numbers):
        raise CheckpointError(
            f"config.json says {spec.top_k} experts per token, {spec.topk_group} of "
            f"{spec.n_group} groups: these must be positive numbers"
        )
    if spec.jitter is not None and spec.top_k != 2:
        raise UnknownRouter(f"sparsemixer chooses 2 experts per token, not {spec.top_k}", _HINT)
    if type(experts) is int:
        check_experts(spec, experts)
    return spec


def check_experts(spec: RouterSpec, experts: int) -> None:
    """CheckpointError unless `spec` is possible with so many experts that have weights."""
    choosable = experts + spec.identity_experts
    if choosable % spec.n_group or spec.topk_group > spec.n_group:
        raise CheckpointError(
            f"{choosable} experts cannot be routed to by {spec.topk_group} of {spec.n_group} groups"
        )
    usable = choosable // spec.n_group * spec.topk_group
    if not spec.top_k <= usable:
        raise CheckpointError(f"{spec.top_k} experts per token are more than the {usable} there")


# ---- routing ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """What a router has in addition to its gate; None for what its spec does not have."""

    bias: F32 | None = None  # [rows of the gate]
    correction: F32 | None = None  # [E]
    input_scale: F32 | None = None  # [H]
    scale: F32 | None = None  # [1]
    expert_scale: F32 | None = None  # [E]
    table: I64 | None = None  # [vocabulary, K]: experts of each token


def wanted(spec: RouterSpec) -> Mapping[str, bool]:
    """For each field of `Stored`, whether `spec` has it."""
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
    belong to `spec.identity_experts`, and behind those to `spec.sinks`. tokens [M] are needed for
    a table only, whose experts come in its order. Of two equal scores the lower expert is chosen.
    Raises UsageError for arrays that do not fit each other, CheckpointError for ones that do not
    fit `spec`.
    """
    stored = stored or Stored()
    _check_arrays(spec, x, weight, stored, tokens)
    logits = _logits(spec, x, weight, stored)
    choosable = logits.shape[1] - spec.sinks
    shown = logits[:, :choosable]
    scores = shown if spec.by_logits else _scores(spec.scoring, shown)
    if spec.jitter is not None:
        return _sparsemixer(shown, spec.top_k, spec.jitter)
    if spec.by_token:
        assert stored.table is not None and tokens is not None, "they are checked"
        ids = stored.table[tokens].astype(np.int64)
    else:
        ids = _chosen(spec, scores if stored.correction is None else scores + stored.correction)
    chosen = np.take_along_axis(scores, ids, axis=1)
    if spec.by_logits:
        chosen = _scores(spec.scoring, chosen)
    if spec.sinks:  # in float64: all scores of a sum may be too small for float32
        wide = logits.astype(np.float64)
        chosen = _scores(spec.scoring, np.take_along_axis(wide, ids, axis=1))
        weights = _weights(spec, chosen, _scores(spec.scoring, wide[:, choosable:]))
    else:
        weights = _weights(spec, chosen)
    for factor in (stored.scale, None if stored.expert_scale is None else stored.expert_scale[ids]):
        weights = weights if factor is None else weights * factor
    return ids, weights.astype(np.float32)


def _check_arrays(
    spec: RouterSpec, x: F32, weight: F32, stored: Stored, tokens: I64 | None
) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise UsageError(f"x {list(x.shape)} and a gate {list(weight.shape)} do not fit")
    rows, experts = len(weight), len(weight) - spec.sinks
    check_experts(spec, experts - spec.identity_experts)
    shapes: dict[str, tuple[int, ...]] = {
        "bias": (rows,), "correction": (experts,), "input_scale": (x.shape[1],), "scale": (1,),
        "expert_scale": (experts,),
    }  # fmt: skip
    for field, needed in wanted(spec).items():
        array = getattr(stored, field)
        if needed != (array is not None):
            state = "has no" if needed else "must not have a"
            raise CheckpointError(f"the router {state} {PARTS[field]}")
        if array is not None and array.shape != shapes.get(field, array.shape):
            shape, right = list(array.shape), list(shapes[field])
            raise UsageError(f"the {PARTS[field]} {shape} must be {right}")
    if stored.table is not None:
        _check_table(spec, stored.table, tokens, len(x), experts)


def _check_table(spec: RouterSpec, ids: I64, tokens: I64 | None, count: int, experts: int) -> None:
    if ids.ndim != 2 or ids.shape[1] != spec.top_k:
        raise UsageError(f"the table of tokens {list(ids.shape)} must be [tokens, {spec.top_k}]")
    if ids.size and not 0 <= ids.min() <= ids.max() < experts:
        raise CheckpointError(
            f"the table of tokens has experts from {ids.min()} to {ids.max()}, but there are "
            f"{experts}"
        )
    if tokens is None or tokens.shape != (count,):
        raise UsageError("a table of tokens needs the token of each row of x")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(ids):
        raise UsageError(f"tokens must be from 0 to {len(ids) - 1}, as in the table")


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


def _scores(scoring: Scoring, logits: Array) -> Array:
    """In the dtype of the logits."""
    if scoring == "sigmoid":
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-logits)), logits.dtype)
    if scoring == "sqrtsoftplus":
        return np.asarray(np.sqrt(np.logaddexp(0, logits)), logits.dtype)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), logits.dtype)


def _chosen(spec: RouterSpec, choice: F32) -> I64:
    """The best `top_k` experts by `choice` [M, E], of the best groups if there are some."""
    if spec.n_group > 1:
        choice = _in_best_groups(spec, choice)
    return np.argsort(-choice, axis=1, kind="stable")[:, : spec.top_k].astype(np.int64)


def _in_best_groups(spec: RouterSpec, choice: F32) -> F32:
    """`choice`, and `spec.masked` for experts of groups that are not chosen."""
    tokens, experts = choice.shape
    groups = choice.reshape(tokens, spec.n_group, experts // spec.n_group)
    counted = 1 if spec.group_score == "max" else 2
    best = np.sort(groups, axis=2)[:, :, -counted:].sum(axis=2)
    chosen = np.argsort(-best, axis=1, kind="stable")[:, : spec.topk_group]
    allowed = np.zeros(best.shape, bool)
    np.put_along_axis(allowed, chosen, True, axis=1)
    kept = np.where(allowed[:, :, None], groups, np.float32(spec.masked))
    return np.asarray(kept.reshape(choice.shape), np.float32)


def _weights(spec: RouterSpec, chosen: Array, sinks: Array | None = None) -> F32:
    """Of the chosen experts' scores [M, K]; sinks [M, S] are scores that only add to the sum."""
    if spec.renormalise:
        summed = chosen if sinks is None else np.concatenate((chosen, sinks), axis=1)
        norm = np.linalg.norm(summed, ord=spec.p_norm, axis=1, keepdims=True)
        chosen = chosen / np.maximum(norm + spec.epsilon, spec.least_sum).astype(chosen.dtype)
    return np.asarray(chosen * np.float32(spec.routed_scaling_factor), np.float32)


def _sparsemixer(logits: F32, top_k: int, jitter: float) -> tuple[I64, F32]:
    """The best expert, then the best of the others, and so on. An expert's weight is its share of
    the softmax over those logits, of it and worse ones, that are within 2 * jitter of the best
    one; the distance is relative to the larger of a logit's size and the best logit
    (SparseMixer-v2, arXiv 2409.12136)."""
    left, rows = logits.copy(), np.arange(len(logits))
    ids = np.empty((len(logits), top_k), np.int64)
    weights = np.empty((len(logits), top_k), np.float32)
    for slot in range(top_k):
        best = left.max(axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):  # all are 0: none is far
            far = (best - logits) / np.maximum(np.abs(logits), best) > 2 * jitter
        ids[:, slot] = left.argmax(axis=1)
        shares = _scores("softmax", np.where(far, np.float32(-np.inf), left))
        weights[:, slot] = shares[rows, ids[:, slot]]
        left[rows, ids[:, slot]] = -np.inf
    return ids, weights
