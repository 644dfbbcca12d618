"""The experts' activation, from config.json and the table of families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ktconv.families import table
from ktconv.families.config import Config
from ktconv.families.config_values import contradiction, is_whole, wrong_value
from ktconv.families.family import PLAIN, ExpertActivation, Family, Router
from ktconv.system.units import counted

_LARGEST = 3.4028234663852886e38  # float32
_BETA_LIMIT = 7.0  # of an activation with an alpha, where nothing says another
_POST_NORM_EPSILON = 1e-8

# What config.json calls activations.
NAMES: Mapping[str, ExpertActivation] = {
    **dict.fromkeys(("silu", "swish"), PLAIN),
    **dict.fromkeys(("gelu", "gelu_python"), ExpertActivation("gelu")),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_tanh"), ExpertActivation("gelu_tanh")
    ),
    **dict.fromkeys(("relu2", "relu_squared"), ExpertActivation("relu2", gated=False)),
    "swigluoai": ExpertActivation(alpha=1.702, limit=_BETA_LIMIT),
    "situ": ExpertActivation(gate_cap=4.0, up_cap=25.0),
}


def expert_activation(config: Config, layer: int | None = None) -> ExpertActivation:
    """The function that the routed experts of `layer` apply between their products; without a
    layer, of one for which lists with a value for each layer have none.

    Raises CheckpointError for values of a wrong kind, and for lists that end before the model's
    layers do.
    """
    text, usual = _settings(config), _usual_activation(config)
    limit = _bound(text, "activation limit", layer)
    after = _bound(text, "limit after activation", layer)
    if limit and after:
        key, other = _key(text, "activation limit"), _key(text, "limit after activation")
        raise contradiction(key, text[key], other, text[other])
    found = _with_factors(text, _named(text, config.family, usual))
    if after:
        return replace(found, limit=after, limit_after=True)
    return found if limit is None else replace(found, limit=limit or math.inf)


def assumed_activation(config: Config) -> str:
    """A sentence if nothing says what the activation is, so that SiLU is assumed; else empty."""
    types = config.model_types
    known = any(table.FAMILIES.of(kind) for kind in types)
    if known or _name(_settings(config), "activation", None):
        return ""
    kind = next((kind for kind in types if isinstance(kind, str)), "this model")
    return (
        f"the activation of {kind} is not known, and config.json does not name it: SiLU is assumed"
    )


def shared_activation(config: Config, layer: int | None = None) -> ExpertActivation:
    """The function that the layer's shared experts apply between their products."""
    row, text = config.family, config.checked_text
    found = replace(
        expert_activation(config, layer), biases=False, weight_on_input=False, post_norm=False
    )
    if found.limit_after or (row is not None and not row.shared_limit):
        found = replace(found, limit=math.inf, limit_after=False)
    if after := _bound(text, "limit after activation of shared experts", layer):
        return replace(found, limit=after, limit_after=True)
    return found


def post_norm_epsilon(config: Config) -> float:
    """The number added to the mean square of an expert's output, where that is normalised."""
    return _number(config.checked_text, "post norm epsilon") or _POST_NORM_EPSILON


def _settings(config: Config) -> Mapping[str, Any]:
    """The text section; of an unknown family also what stands outside of it, since a limit or a
    function that is overlooked makes results wrong."""
    text = config.checked_text
    return text if config.family is not None else {**config.content, **text}


def _usual_activation(config: Config) -> ExpertActivation:
    """The activation in the rows of the text section and of the whole config. A model that took
    its text section over from another family may compute something else than that one."""
    usual = PLAIN
    for kind in config.model_types:
        row = table.FAMILIES.of(kind)
        if row is not None and usual == PLAIN:
            spec = row.routing.spec if isinstance(row.routing, Router) else None
            usual = replace(
                row.activation,
                biases=row.expert_biases,
                weight_on_input=spec is not None and spec.weight_on_input,
                post_norm=bool(row.post_norm),
            )
    return usual


def _named(
    text: Mapping[str, Any], row: Family | None, usual: ExpertActivation
) -> ExpertActivation:
    """`usual` with the function that config.json names."""
    name = _name(text, "activation", row)
    named = NAMES.get(name, ExpertActivation(name)) if name else usual
    if named.function == usual.function and (named == PLAIN or usual.alpha or usual.capped):
        return usual
    return replace(
        usual,
        function=named.function,
        gated=usual.gated and named.gated,
        alpha=named.alpha,
        gate_cap=named.gate_cap,
        up_cap=named.up_cap,
        limit=min(named.limit, usual.limit),
    )


def _with_factors(text: Mapping[str, Any], usual: ExpertActivation) -> ExpertActivation:
    """`usual` with the alpha and the caps of config.json."""
    if situ := _number(text, "situ gate cap"):
        up_cap = _number(text, "situ up cap")
        return replace(usual, alpha=None, gate_cap=situ, up_cap=up_cap or math.inf)
    gate_cap, up_cap = _number(text, "gate cap"), _number(text, "up cap")
    if gate_cap or up_cap:
        usual = replace(usual, gate_cap=gate_cap or usual.gate_cap, up_cap=up_cap or usual.up_cap)
    alpha = _number(text, "activation alpha")
    if alpha is None:
        return usual
    if not alpha:
        return replace(usual, alpha=None)
    return replace(usual, alpha=alpha, limit=usual.limit if usual.limited else _BETA_LIMIT)


def _bound(text: Mapping[str, Any], setting: str, layer: int | None) -> float | None:
    """The number for `layer`, 0 where there is none; None where config.json does not say."""
    key = _key(text, setting)
    value = text.get(key)
    if not isinstance(value, list):
        return _number(text, setting)
    layers: Any = text.get(_key(text, "layers"))
    if is_whole(layers) and len(value) < layers:
        raise wrong_value(key, value, f"a number for each of the {counted(layers, 'layer')}")
    for one in value:
        _checked(key, one or 0)
    if layer is None or layer >= len(value):
        return 0.0
    return float(value[layer] or 0)


def _key(text: Mapping[str, Any], setting: str) -> str:
    """The first of the setting's names that has a value, else the usual one."""
    keys = table.FAMILIES.keys(setting)
    return next((key for key in keys if text.get(key) is not None), keys[0])


def experts_have_gate(config: Config) -> bool | None:
    """Whether experts have a gate: by the family, else by the function that config.json names.
    None where it names none, or one that experts have with and without a gate."""
    row = config.family
    if row is None and not _name(_settings(config), "activation", None):
        return None
    found = expert_activation(config)
    open_to_both = row is None and found.gated and replace(found, gated=False).supported
    return None if open_to_both else found.gated


def _number(text: Mapping[str, Any], setting: str) -> float | None:
    """A number of at least 0; None where there is none."""
    key = _key(text, setting)
    return None if text.get(key) is None else _checked(key, text[key])


def _checked(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_value(key, value, "a number")
    if not 0 <= value <= _LARGEST:
        raise wrong_value(key, value, "a positive float32 number")
    return float(value)


def _name(text: Mapping[str, Any], setting: str, family: Family | None) -> str:
    """The first that is not empty; empty where there is none. Keys of the family's own are those
    of its experts alone: others are another module's. CheckpointError where the keys of an unknown
    family disagree."""
    own = family.keys.get(setting) if family is not None else None
    names = {key: _at(text, key) for key in own or table.FAMILIES.keys(setting)}
    for key, name in names.items():
        if not isinstance(name, (str, type(None))):
            raise wrong_value(key, name, "a name")
    given = {key: name for key, name in names.items() if name}
    key, name = next(iter(given.items()), ("", ""))
    for other, another in given.items() if family is None else ():
        if NAMES.get(another, another) != NAMES.get(name, name):
            raise contradiction(key, name, other, another)
    return name


def _at(section: Mapping[str, Any], key: str) -> Any:
    """The value under a key, which may be a path: ffn_config.ffn_act_fn.name; a name where the path
    goes on is one, too."""
    value: Any = section
    for part in key.split("."):
        if not isinstance(value, str):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
