"""The router of an MoE layer in NumPy: which experts a token goes to, and with what weights.

For where a model's own code is not at hand. Everything is float32, as the families' own routers
are where it matters; a model that computes its logits in bf16 may choose otherwise between
experts whose scores nearly agree.

    spec = router_of(config, layer)
    ids, weights = route(spec, x, gate)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ktconv.checkpoint.config import TOP_K_KEYS, text_section
from ktconv.errors import CheckpointError, UsageError

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


class UnknownRouter(CheckpointError):
    """A router that is not in the table here, whether or not the checkpoint is sound."""


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How one layer routes; the order of the fields is the order of the steps.

    Scores choose experts: the best `topk_group` of `n_group` groups first where there are
    several, then the best `top_k` experts in them. `correction` is added to the scores for that
    choice only; the weights are the chosen experts' scores without it.
    """

    scoring: Scoring
    top_k: int = 0
    bias: bool = False  # the gate is a linear layer with a bias
    softmax_last: bool = False  # over the chosen experts' logits, not over those of all experts
    correction: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "top2"  # of a group: its best expert's, or the sum of its best two
    renormalise: bool = True  # weights are divided by their sum
    epsilon: float = 1e-20  # that is added to the sum
    routed_scaling_factor: float = 1.0
    weight_on_input: bool = False  # the weight multiplies the expert's input, not its output


@dataclass(frozen=True, slots=True)
class _Family:
    """A row of the table: what is always so, and what config.json may change."""

    spec: RouterSpec
    reads: frozenset[str] = frozenset()


def _family(spec: RouterSpec, *reads: str) -> _Family:
    return _Family(spec, frozenset(reads))


_SOFTMAX = RouterSpec("softmax")
_PLAIN = RouterSpec("softmax", renormalise=False)
_CORRECTED = RouterSpec("sigmoid", correction=True)
_NOAUX = _family(_CORRECTED, "renormalise", "groups", "scale")
_DEEPSEEK_V3 = _family(
    replace(_CORRECTED, n_group=8, topk_group=4, routed_scaling_factor=2.5), *_NOAUX.reads
)
_QWEN = _family(_PLAIN, "renormalise")

# By model_type, without the "_text" of a multimodal model's section.
_FAMILIES: dict[str, _Family] = {
    "mixtral": _family(_SOFTMAX),
    "minimax": _family(_SOFTMAX),
    "hunyuan_v1_moe": _family(_SOFTMAX),
    "qwen3_vl_moe": _family(_SOFTMAX),
    "qwen3_5_moe": _family(_SOFTMAX),
    "jamba": _family(_PLAIN),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_omni_moe": _family(_SOFTMAX, "renormalise"),
    "qwen3_next": _family(_SOFTMAX, "renormalise"),
    "olmoe": _QWEN,
    "flex_olmo": _QWEN,
    "deepseek_v2": _family(replace(_PLAIN, group_score="max"), "groups", "scale"),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_linear": _NOAUX,
    "glm4_moe": _NOAUX,
    "glm4v_moe": _NOAUX,
    "glm4_moe_lite": _family(replace(_CORRECTED, routed_scaling_factor=1.8), *_NOAUX.reads),
    "glm_moe_dsa": _family(replace(_CORRECTED, routed_scaling_factor=2.5), *_NOAUX.reads),
    "exaone_moe": _family(replace(_CORRECTED, routed_scaling_factor=2.5), *_NOAUX.reads),
    "dots1": _family(replace(_CORRECTED, renormalise=False), *_NOAUX.reads),
    "solar_open": _NOAUX,
    "minimax_m2": _family(_CORRECTED, "correction"),
    "minimax_m3_vl": _family(_CORRECTED, "scale"),
    "afmoe": _family(_CORRECTED, "scale"),
    "lfm2_moe": _family(replace(_CORRECTED, epsilon=1e-6), "renormalise", "scale", "correction"),
    "ernie4_5_moe": _family(replace(_SOFTMAX, correction=True, epsilon=1e-12)),
    "gpt_oss": _family(replace(_SOFTMAX, bias=True, softmax_last=True, renormalise=False)),
    "granitemoe": _family(replace(_SOFTMAX, softmax_last=True, renormalise=False)),
    "llama4": _family(RouterSpec("sigmoid", renormalise=False, weight_on_input=True)),
}
_REFUSED = {
    "phimoe": "samples its experts one after the other",
    "longcat_flash": "also routes to experts that do nothing",
    "deepseek_v4": "routes some layers by token",
}

_KEYS = {
    "model_type": ("model_type",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "top_k": TOP_K_KEYS,
    "scoring": (
        "scoring_func", "score_func", "score_function", "moe_router_activation_func",
    ),
    "method": ("topk_method",),
    "renormalise": ("norm_topk_prob", "moe_renormalize", "route_norm"),
    "scale": ("routed_scaling_factor", "route_scale"),
    "correction": ("use_routing_bias", "use_expert_bias"),
    "n_group": ("n_group", "num_expert_group"),
    "topk_group": ("topk_group",),
}  # fmt: skip


def router_of(config: Mapping[str, Any], layer: int) -> RouterSpec:
    """The router of layer `layer`, from a model's config.json.

    Raises UnknownRouter where config.json names a router that is not known here or, for a family
    that is not in the table, does not say how it routes; CheckpointError where it contradicts
    itself or the family.
    """
    text = text_section(config)
    name = str(_value(text, "model_type") or "").removesuffix("_text")
    if name in _REFUSED:
        raise UnknownRouter(f"the router of {name} is not known: it {_REFUSED[name]}", _HINT)
    family = _FAMILIES.get(name) or _inferred(name, text)
    _check_stated(name, text, family.spec)
    return _checked(_read(family, text, layer), _value(text, "experts"))


_HINT = "load the model with transformers, which has its own router"


def _value(text: Mapping[str, Any], what: str) -> Any:
    """Under the first of the names that models give to it; None: not given."""
    return next((text[key] for key in _KEYS[what] if text.get(key) is not None), None)


def _inferred(name: str, text: Mapping[str, Any]) -> _Family:
    """A family that is not in the table, by the keys that such models share."""
    method, scoring = _value(text, "method"), _value(text, "scoring")
    if method is None and scoring is None and _value(text, "renormalise") is None:
        raise UnknownRouter(f"config.json does not say how {name or 'this model'} routes", _HINT)
    corrected = method == "noaux_tc"
    if scoring is None:
        scoring = "sigmoid" if corrected else "softmax"
    if scoring not in ("softmax", "sigmoid"):
        raise UnknownRouter(f"config.json names the router scores {scoring!r}, not known", _HINT)
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        raise UnknownRouter(f"config.json names the top-k method {method!r}, not known", _HINT)
    if corrected and scoring == "softmax":
        raise CheckpointError("config.json contradicts itself: noaux_tc with softmax", _HINT)
    rule: GroupScore = "max" if method == "group_limited_greedy" else "top2"
    spec = RouterSpec(scoring, correction=corrected, group_score=rule)
    return _family(spec, "renormalise", "groups", "scale", "correction")


def _check_stated(name: str, text: Mapping[str, Any], spec: RouterSpec) -> None:
    """What config.json states beside the model_type must be what that family does."""
    stated = _value(text, "scoring")
    if stated in ("softmax", "sigmoid") and stated != spec.scoring:
        raise CheckpointError(
            f"config.json contradicts itself: {name} scores by {spec.scoring}, not {stated}",
            "check that config.json belongs to this checkpoint",
        )
    if name == "deepseek_v2":
        if _value(text, "method") not in (None, "greedy", "group_limited_greedy"):
            method = text["topk_method"]
            raise UnknownRouter(f"deepseek_v2 does not have the top-k method {method!r}", _HINT)
        if _value(text, "renormalise"):  # implementations do not agree on what that does
            raise UnknownRouter("deepseek_v2 with norm_topk_prob is not supported", _HINT)


def _read(family: _Family, text: Mapping[str, Any], layer: int) -> RouterSpec:
    """The family's spec with what it reads from config.json."""
    top_k = _value(text, "top_k")
    if isinstance(top_k, list):
        top_k = top_k[layer] if layer < len(top_k) else None
    found: dict[str, Any] = {"top_k": top_k}
    for key in ("renormalise", "correction"):
        if key in family.reads and _value(text, key) is not None:
            found[key] = bool(_value(text, key))
    if "scale" in family.reads and _value(text, "scale") is not None:
        found["routed_scaling_factor"] = float(_value(text, "scale"))
    # A greedy choice looks at no groups, even where config.json has a number of them.
    grouped = family.spec.group_score == "top2" or _value(text, "method") == "group_limited_greedy"
    if "groups" in family.reads and grouped:
        for key in ("n_group", "topk_group"):
            if _value(text, key) is not None:
                found[key] = _value(text, key)
    return replace(family.spec, **found)


def _checked(spec: RouterSpec, experts: Any) -> RouterSpec:
    """CheckpointError unless the numbers fit each other and the number of experts, if known."""
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
    """CheckpointError unless so many experts can be routed to like that."""
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
            state = "lacks its" if needed else "must not have a"
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
