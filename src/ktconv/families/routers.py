"""The router of an MoE layer, by a model's config.json; `routing.py` runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.config import Config, top_k_of
from ktconv.families.family import SCORINGS, GroupScore, Router, RouterSpec
from ktconv.system.units import counted


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


class FoundRouter(Struct, frozen=True):
    """`inferred`: from what, where the family is not in the table; empty where it is."""

    spec: RouterSpec
    inferred: str = ""


def router_of(config: Config | Mapping[str, Any], layer: int) -> RouterSpec:
    """The router of layer `layer`, from a model's config.json.

    Raises UnknownRouter where config.json names a router that is not known here or, for a family
    that is not in the table, does not say how it routes; CheckpointError where it contradicts
    itself or the family.
    """
    known = config if isinstance(config, Config) else Config(config)
    return find_router(known, layer).spec


def find_router(config: Config, layer: int, corrected: bool | None = None) -> FoundRouter:
    """The router of `router_of`, and from what it is inferred where the family is not in the table.

    `corrected`: whether the checkpoint has a correction bias for this layer, where that is known.
    For such a family it decides what config.json leaves open.
    """
    top_k, own = top_k_of(config, layer), config.own_of(layer)
    found = _found(config, own, layer, corrected)
    if top_k is None:
        raise CheckpointError("config.json does not say how many experts are chosen for a token")
    spec = replace(found.spec, top_k=top_k)
    return replace(found, spec=_checked(spec, config.values["experts"]))


def stated_router(config: Config, layer: int, experts: int, corrected: bool) -> RouterSpec | None:
    """The router of a layer, as far as family and config.json tell it; its `top_k` is 0 where they
    do not. None for one that is not known.

    Raises CheckpointError where config.json contradicts the family, or the number of experts.
    """
    top_k, own = top_k_of(config, layer), config.own_of(layer)
    try:
        found = _found(config, own, layer, corrected)
    except UnknownRouter:
        return None
    spec = found.spec
    grouped = config.own["n_group"] is not None
    if found.inferred or spec.n_group == 1 or not grouped:
        return replace(spec, top_k=top_k or 0)
    try:
        _checked(replace(spec, top_k=top_k or min(spec.topk_group, experts)), experts)
    except UnknownRouter:
        return None
    return replace(spec, top_k=top_k or 0)


def _found(
    config: Config, own: Mapping[str, Any], layer: int, corrected: bool | None
) -> FoundRouter:
    """The router without the number of experts per token; `own`: the values for `layer`."""
    name, row = config.type, config.family
    routing, inferred = row.routing if row is not None else None, ""
    if isinstance(routing, str):
        raise UnknownRouter(f"the router of {name} is not supported: it {routing}", _HINT)
    if routing is None:
        routing, inferred = _inferred(config, corrected)
    routing = routing.by_method.get(str(config.values["method"]), routing)
    _check_stated(config, routing)
    spec = _read(routing, config, own)
    if "hash layers" in routing.reads and _is_hashed(config, layer, corrected):
        spec = replace(spec, by_token=True, correction=False)
    return FoundRouter(spec, inferred)


def rows_beside_experts(config: Config) -> int | None:
    """Count the rows of a router that belong to no expert with weights: those of experts that
    return their input, and of shared experts. None where neither family nor config.json say it."""
    row = config.family
    routing = row.routing if row is not None else None
    if row is None or not isinstance(routing, Router):
        return None
    for setting, field in (("zero experts", "identity_experts"), ("shared experts", "sinks")):
        if getattr(routing.spec, field) and config.own[setting] is None:
            return None
    spec = _read(routing, config, config.own_of(0))
    return spec.identity_experts + spec.sinks


_BELONGS = "check that config.json belongs to this checkpoint"
_HINT = "load the model with transformers, which implements its router"


def _inferred(config: Config, corrected: bool | None) -> tuple[Router, str]:
    """The router of a family that is not in the table: by the keys that such models share, and the
    tensors.

    Softmax only where the checkpoint has no correction bias, or config.json says softmax.
    """
    text, values = config.text, config.values
    shown = {key: text[key] for key in _keys("method", "scoring", "renormalise") if key in text}
    method, scoring = values["method"], values["scoring"]
    if not any(value is not None for value in shown.values()) and not corrected:
        raise UnknownRouter(
            f"config.json does not describe the router of {config.type or 'this model'}", _HINT
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


def _check_stated(config: Config, router: Router) -> None:
    """CheckpointError or UnknownRouter if config.json contradicts the family's router."""
    name, stated, scoring = config.type, config.own["scoring"], router.spec.scoring
    if "scoring" in router.reads:
        if stated not in (None, *SCORINGS):
            raise UnknownRouter(
                f"config.json has the unknown router score function {stated!r}", _HINT
            )
    elif stated in SCORINGS and stated != scoring:
        raise CheckpointError(
            f"config.json contradicts itself: {name} scores by {scoring}, not {stated}",
            _BELONGS,
        )
    method = config.values["method"]
    if router.methods is not None and method not in (None, *router.methods):
        raise UnknownRouter(f"{name} does not have the top-k method {method!r}", _HINT)
    for setting in router.never:
        if config.values[setting]:
            key = next(key for key in table.FAMILIES.keys(setting) if config.text.get(key))
            raise UnknownRouter(f"{name} with {key} is not supported", _HINT)


def _read(router: Router, config: Config, own: Mapping[str, Any]) -> RouterSpec:
    """The family's spec with what it reads from config.json."""
    found: dict[str, Any] = {}
    for setting in router.reads & SETTINGS.keys():
        field, kind = SETTINGS[setting]
        value = own[setting]
        if value is not None and (value is not False or kind is bool):  # false: there is none
            found[field] = kind(value)
    norms = (config.text.get(key, 1) for key in _keys("p-norm"))
    if "p-norm" in router.reads and any(norm in (None, False) for norm in norms):
        found["renormalise"] = False
    # A greedy choice looks at no groups, even where config.json has a number of them.
    grouped = router.spec.group_score == "top2" or config.values["method"] == "group_limited_greedy"
    if "groups" in router.reads and grouped:
        for key in ("n_group", "topk_group"):
            if own[key] is not None:
                found[key] = own[key]
    return replace(router.spec, **found)


_HASH_LAYERS = 3  # of DeepSeek-V4, where config.json does not say


def _is_hashed(config: Config, layer: int, corrected: bool | None) -> bool:
    """Whether this layer's experts follow from the token alone; then it has no correction bias."""
    kinds = config.values["kind of each layer"]
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "hash_moe"
    first = config.values["hash layers"]
    if first is None and corrected is not None:
        return not corrected
    return layer < (_HASH_LAYERS if first is None else int(first))


def _checked(spec: RouterSpec, experts: Any) -> RouterSpec:
    """CheckpointError unless the numbers fit each other and the number of experts, if known."""
    numbers = (spec.top_k, spec.n_group, spec.topk_group)
    if any(type(number) is not int or number < 1 for number in numbers):
        raise CheckpointError(
            f"config.json says {counted(spec.top_k, 'expert')} per token, {spec.topk_group} of "
            f"{spec.n_group} groups: these must be positive numbers"
        )
    if spec.jitter is not None and spec.top_k != 2:
        raise UnknownRouter(f"sparsemixer chooses 2 experts per token, not {spec.top_k}", _HINT)
    if type(experts) is int:
        check_experts(spec, experts)
    return spec


def check_experts(spec: RouterSpec, experts: int) -> None:
    """CheckpointError unless `spec` is possible with this number of experts that have weights."""
    choosable = experts + spec.identity_experts
    if choosable % spec.n_group or spec.topk_group > spec.n_group:
        raise CheckpointError(
            f"{counted(choosable, 'expert')} cannot be routed to by {spec.topk_group} of "
            f"{spec.n_group} "
            "groups",
            _BELONGS,
        )
    usable = choosable // spec.n_group * spec.topk_group
    if not spec.top_k <= usable:
        raise CheckpointError(
            f"{counted(spec.top_k, 'expert')} per token {'is' if spec.top_k == 1 else 'are'} more "
            f"than the {usable} there",
            _BELONGS,
        )
