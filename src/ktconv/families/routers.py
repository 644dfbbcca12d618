"""The router of an MoE layer in NumPy: which experts a token goes to, and with what weights.

Used where a model's own code is not available. Everything is float32, as in most families' own
routers; a model that computes its logits in bf16 may choose differently between experts with nearly
equal scores.

    spec = router_of(config, layer)
    ids, weights = route(spec, x, gate)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.families.config import family_of, text_section, top_k_of, value_of
from ktconv.families.family import GroupScore, Router, RouterSpec, Scoring
from ktconv.system.arrays import F32, I64


class UnknownRouter(CheckpointError):
    """A router that is not in the table here, whether or not the checkpoint is sound."""


def router_of(config: Mapping[str, Any], layer: int) -> RouterSpec:
    """The router of layer `layer`, from a model's config.json.

    Raises UnknownRouter where config.json names a router that is not known here or, for a family
    that is not in the table, does not say how it routes; CheckpointError where it contradicts
    itself or the family.
    """
    text, row = text_section(config), family_of(config)
    name = str(value_of(text, "model type") or "").removesuffix("_text")
    routing = row.routing if row is not None else None
    if isinstance(routing, str):
        raise UnknownRouter(f"the router of {name} is not supported: it {routing}", _HINT)
    router = routing or _inferred(name, text)
    _check_stated(name, text, router)
    spec = _read(router, text, top_k_of(config, layer))
    return _checked(spec, value_of(text, "experts"))


_HINT = "load the model with transformers, which implements its router"


def _inferred(name: str, text: Mapping[str, Any]) -> Router:
    """A family that is not in the table, by the keys that such models share."""
    method, scoring = value_of(text, "method"), value_of(text, "scoring")
    if method is None and scoring is None and value_of(text, "renormalise") is None:
        raise UnknownRouter(
            f"config.json does not describe the router of {name or 'this model'}", _HINT
        )
    corrected = method == "noaux_tc"
    if scoring is None:
        scoring = "sigmoid" if corrected else "softmax"
    if scoring not in ("softmax", "sigmoid"):
        raise UnknownRouter(f"config.json has the unknown router score function {scoring!r}", _HINT)
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        raise UnknownRouter(f"config.json has the unknown top-k method {method!r}", _HINT)
    if corrected and scoring == "softmax":
        raise CheckpointError("config.json contradicts itself: noaux_tc with softmax", _HINT)
    rule: GroupScore = "max" if method == "group_limited_greedy" else "top2"
    spec = RouterSpec(scoring, correction=corrected, group_score=rule)
    return Router(spec, frozenset(("renormalise", "groups", "scale", "correction")))


def _check_stated(name: str, text: Mapping[str, Any], router: Router) -> None:
    """CheckpointError or UnknownRouter if config.json contradicts the family's router."""
    stated, scoring = value_of(text, "scoring"), router.spec.scoring
    if stated in ("softmax", "sigmoid") and stated != scoring:
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


def _read(router: Router, text: Mapping[str, Any], top_k: int | None) -> RouterSpec:
    """The family's spec with what it reads from config.json."""
    found: dict[str, Any] = {"top_k": top_k}
    for key in ("renormalise", "correction"):
        if key in router.reads and value_of(text, key) is not None:
            found[key] = bool(value_of(text, key))
    if "scale" in router.reads and value_of(text, "scale") is not None:
        found["routed_scaling_factor"] = float(value_of(text, "scale"))
    # A greedy choice looks at no groups, even where config.json has a number of them.
    grouped = (
        router.spec.group_score == "top2" or value_of(text, "method") == "group_limited_greedy"
    )
    if "groups" in router.reads and grouped:
        for key in ("n_group", "topk_group"):
            if value_of(text, key) is not None:
                found[key] = value_of(text, key)
    return replace(router.spec, **found)


def _checked(spec: RouterSpec, experts: Any) -> RouterSpec:
    """CheckpointError unless the numbers fit each other and the number of experts, if known."""
    if spec.top_k is None:
        raise CheckpointError("config.json does not say how many experts are chosen for a token")
    numbers = (spec.top_k, spec.n_group, spec.topk_group)
    if any(type(number) is not int or number < 1 for number in numbers):
        raise CheckpointError(
            f"config.json says {spec.top_k} experts per token, {spec.topk_group} of "
            f"{spec.n_group} groups: these must be positive numbers"
        )
    if type(experts) is int:
        check_experts(spec, experts)
    return spec


def check_experts(spec: RouterSpec, experts: int) -> None:
    """CheckpointError unless `spec` is possible with so many experts."""
    if experts % spec.n_group or spec.topk_group > spec.n_group:
        raise CheckpointError(
            f"{experts} experts cannot be routed to by {spec.topk_group} of {spec.n_group} groups"
        )
    usable = experts // spec.n_group * spec.topk_group
    if not spec.top_k <= usable:
        raise CheckpointError(f"{spec.top_k} experts per token are more than the {usable} there")


# ---- routing ---------------------------------------------------------------------------


def route(
    spec: RouterSpec,
    x: F32,
    weight: F32,
    *,
    bias: F32 | None = None,
    correction: F32 | None = None,
) -> tuple[I64, F32]:
    """Experts of each token, best first, and their weights: int64 and float32 [M, K].

    x [M, H] is what goes into the router and the experts, weight [E, H] the gate, bias and
    correction [E]. Of two equal scores the lower expert is chosen. Raises UsageError for arrays
    that do not fit each other, CheckpointError for ones that do not fit `spec`.
    """
    _check_arrays(spec, x, weight, bias, correction)
    logits = x.astype(np.float32) @ weight.astype(np.float32).T
    if bias is not None:
        logits += bias
    scores = logits if spec.softmax_last else _scores(spec.scoring, logits)
    choice = scores if correction is None else scores + correction
    if spec.n_group > 1:
        choice = _in_best_groups(spec, choice)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : spec.top_k].astype(np.int64)
    return ids, _weights(spec, np.take_along_axis(scores, ids, axis=1))


def _check_arrays(
    spec: RouterSpec, x: F32, weight: F32, bias: F32 | None, correction: F32 | None
) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise UsageError(f"x {list(x.shape)} and a gate {list(weight.shape)} do not fit")
    check_experts(spec, len(weight))
    wanted = (("bias", bias, spec.bias), ("correction bias", correction, spec.correction))
    for what, array, needed in wanted:
        if needed != (array is not None):
            state = "has no" if needed else "must not have a"
            raise CheckpointError(f"the router {state} {what}")
        if array is not None and array.shape != (len(weight),):
            raise UsageError(f"the {what} {list(array.shape)} must be [{len(weight)}]")


def _scores(scoring: Scoring, logits: F32) -> F32:
    if scoring == "sigmoid":
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-logits)), np.float32)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)


def _in_best_groups(spec: RouterSpec, choice: F32) -> F32:
    """`choice`, and minus infinity for experts of groups that are not chosen."""
    tokens, experts = choice.shape
    groups = choice.reshape(tokens, spec.n_group, experts // spec.n_group)
    counted = 1 if spec.group_score == "max" else 2
    best = np.sort(groups, axis=2)[:, :, -counted:].sum(axis=2)
    chosen = np.argsort(-best, axis=1, kind="stable")[:, : spec.topk_group]
    allowed = np.zeros(best.shape, bool)
    np.put_along_axis(allowed, chosen, True, axis=1)
    kept = np.where(allowed[:, :, None], groups, np.float32(-np.inf))
    return np.asarray(kept.reshape(choice.shape), np.float32)


def _weights(spec: RouterSpec, chosen: F32) -> F32:
    """Of the chosen experts' scores, or of their logits where the softmax comes last."""
    if spec.softmax_last:
        chosen = _scores("softmax", chosen)
    if spec.renormalise:
        chosen = chosen / (chosen.sum(axis=1, keepdims=True) + np.float32(spec.epsilon))
    return np.asarray(chosen * np.float32(spec.routed_scaling_factor), np.float32)
