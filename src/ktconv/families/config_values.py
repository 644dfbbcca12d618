"""Types and ranges of the values of config.json that decide what a model computes.

Only values that no model can have are refused, such as a text instead of a number, a NaN, or a
factor of -1e30:
readers differ in how they interpret them, and the converted model would keep them. A null always
means "not given".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.families import table

CONFIG_NAME = "config.json"
CONFIG_HINT = "Copy the config.json that belongs to this checkpoint next to its weights."


class _Rule(Struct, frozen=True):
    """A condition on a value, and the words for it."""

    allows: Callable[[Any], bool]
    words: str


def is_whole(value: object, least: int = 0) -> bool:
    """Whether this is an integer of at least `least`; True and 1.0 are not integers here."""
    return type(value) is int and value >= least


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _each(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Test for keys that can have one value for all layers, or a list with one for each.

    An empty list has a value for no layer.
    """

    def holds_for_all(value: Any) -> bool:
        return bool(value) and all(map(holds, value)) if isinstance(value, list) else holds(value)

    return holds_for_all


_NAME = _Rule(lambda value: isinstance(value, str) and "\0" not in value, "a name")
_FLAG = _Rule(lambda value: type(value) is bool or value in (0, 1), "true or false")
_COUNT = _Rule(is_whole, "a number of experts")
_LAYERS = _Rule(is_whole, "a number of layers")
# -1 can mean "none", and in Hunyuan's files false does.
_INTEGER = _Rule(lambda value: type(value) is int or value is False, "an integer")
# Every n-th layer: no reader has an n of 0.
_PERIOD = _Rule(lambda value: is_whole(value, 1), "a number of at least 1")
_OBJECT = _Rule(lambda value: isinstance(value, dict), "an object")
_LIST = _Rule(
    lambda value: isinstance(value, list) and all(type(one) is int for one in value),
    "a list of layers",
)
_WORDS = _Rule(
    lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value),
    "a list of names",
)
# Far beyond what any model has, and still far from where float32 ends.
_MOST = 1e4
_EPSILON = _Rule(
    lambda value: _is_number(value) and 0 <= value <= 1, "a number of at least 0 and at most 1"
)
_SOFTCAP = _Rule(
    lambda value: _is_number(value) and 0 <= value <= _MOST, f"a number from 0 to {_MOST:g}"
)
_NORM = _Rule(
    lambda value: value is False or (_is_number(value) and 0 < value <= 100),
    "a number above 0 and up to 100, or false",
)
_SHARED = _Rule(_each(lambda value: value is False or is_whole(value)), "a number of experts")
_FACTOR = _Rule(
    _each(
        lambda value: value is None or value is False or (_is_number(value) and 0 <= value <= _MOST)
    ),
    f"a finite number from 0 to {_MOST:g}",
)
_LIMIT = _Rule(
    _each(lambda value: value is None or (_is_number(value) and value >= 0)),
    "a number of at least 0",
)
_CAP = _Rule(lambda value: _is_number(value) and value > 0, "a number above 0")
# Every n-th layer, or for each layer whether it has experts.
_FREQUENCY = _Rule(
    lambda value: (
        all(type(one) is bool or is_whole(one) for one in value)
        if isinstance(value, list)
        else is_whole(value, 1)
    ),
    "a number of at least 1 or a list of 0 and 1",
)
_ROPE = _Rule(
    lambda value: (
        isinstance(value, dict) or _each(lambda one: _is_number(one) and 0 < one <= 1e15)(value)
    ),
    "a number above 0 and up to 1e15",
)
_KINDS = _Rule(
    lambda value: isinstance(value, str) or _WORDS.allows(value), "a list of names or a text"
)
_NUMBERS = _Rule(
    lambda value: (
        isinstance(value, str) and bool(re.fullmatch(r" *|( *[0-9]+ *,)* *[0-9]+ *", value))
    ),
    "numbers of layers with commas between them",
)
_INDICES = _Rule(
    lambda value: (
        bool(value) and all(is_whole(one, -1) for one in value)
        if isinstance(value, list)
        else is_whole(value, -1)
    ),
    "the number of a layer",
)
_TOP_K = _Rule(
    lambda value: _each(is_whole)(value) and value != 0, "a number of experts or a list of them"
)

# By names of settings in table.KEYS.
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("model type", "activation", "scoring", "method"), _NAME),
    **dict.fromkeys(("renormalise", "correction", "weight on input", "experts choose"), _FLAG),
    **dict.fromkeys(("scale", "activation alpha", "logit scale"), _FACTOR),
    **dict.fromkeys(("norm epsilon", "least sum", "router jitter"), _EPSILON),
    "logit softcap": _SOFTCAP,
    "p-norm": _NORM,
    "top_k": _TOP_K,
    **dict.fromkeys(("n_group", "topk_group", "leading dense layers", "MoE offset"), _INTEGER),
    "zero experts": _COUNT,
    "hash layers": _LAYERS,
    "shared experts": _SHARED,
    **dict.fromkeys(("text section", "MoE section"), _OBJECT),
    **dict.fromkeys(
        ("activation limit", "limit after activation", "limit after activation of shared experts"),
        _LIMIT,
    ),
    **dict.fromkeys(("gate cap", "up cap", "situ gate cap", "situ up cap"), _CAP),
    "post norm epsilon": _EPSILON,
    **dict.fromkeys(("MoE layers", "dense layers"), _LIST),
    "MoE frequency": _FREQUENCY,
    "kind of each layer": _WORDS,
    "kind of each block": _KINDS,
    "MoE layers in a text": _NUMBERS,
    **dict.fromkeys(("first MoE layer", "last MoE layer"), _INDICES),
    **dict.fromkeys(("sparse step", "MoE interval", "MoE period", "MoE step"), _PERIOD),
}
# Of keys that ktconv itself does not read.
_UNREAD: Mapping[str, _Rule] = {
    **dict.fromkeys(
        ("rms_norm_epsilon", "norm_eps", "norm_epsilon", "layer_norm_eps",
         "layer_norm_epsilon", "layernorm_epsilon"), _EPSILON,
    ),
    "rope_theta": _ROPE,
}  # fmt: skip


def check_values(sections: Iterable[Mapping[str, Any]]) -> None:
    """CheckpointError naming the first impossible value in these sections."""
    keys = table.FAMILIES.keys
    rules = {key: rule for setting, rule in _RULES.items() for key in keys(setting)}
    rules.update(_UNREAD)
    for section in sections:
        for key, rule in rules.items():
            value = section.get(key)
            if value is not None and not rule.allows(value):
                raise wrong_value(key, value, rule.words)


def contradiction(first: str, value: object, other: str, another: object) -> CheckpointError:
    """Error for two keys of one setting whose values differ."""
    values = f"{first} is {value!r:.80} but {other} is {another!r:.80}"
    return CheckpointError(f"{CONFIG_NAME} contradicts itself: {values}", CONFIG_HINT)


def wrong_value(key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG_NAME}: {key} is {value!r:.80}, not {wanted}", CONFIG_HINT)
