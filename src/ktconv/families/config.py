"""The one reader of config.json: settings by the names that families have for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.families import table
from ktconv.families.config_values import contradiction, is_whole, wrong_value
from ktconv.families.family import ExpertActivation, Family

USUAL_TOP_K = 8  # where config.json does not say
_LARGEST = 3.4028234663852886e38  # float32
_UNGATED_FUNCTIONS = ("relu2", "relu_squared")  # no family has them with a gate
_BETA_LIMIT = 7.0  # of an activation with an alpha, where nothing says another


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's section of config.json, which is all of it for a text model."""
    section: Any = config
    while section is not None:
        config = section
        inner = (config.get(key) for key in table.FAMILIES.keys("text section"))
        section = next((one for one in inner if isinstance(one, dict)), None)
    return config


def sections_of(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The text section, then the whole config if that is different; the first takes precedence."""
    text = text_section(config)
    return (text,) if text is config else (text, config)


def value_of(section: Mapping[str, Any], setting: str) -> Any:
    """The value under the first of the setting's names that is present; None if none is."""
    given = (section.get(key) for key in table.FAMILIES.keys(setting))
    return next((value for value in given if value is not None), None)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The row of the table for this config.json's text section."""
    return table.FAMILIES.of(value_of(text_section(config), "model type"))


def top_k_of(config: Mapping[str, Any], layer: int | None = None) -> int | None:
    """How many experts a token goes to in `layer`; None where config.json does not say.

    The first section with any of the keys decides, and in it the first key in the order of
    `Families.keys`; a list that is too short for `layer` decides that nothing is said. Raises
    CheckpointError for a value that is not a count, such as a list without a `layer`, and where
    keys of one section disagree.
    """
    _checked_text_section(config)
    keys = table.FAMILIES.keys("top_k", family_of(config))
    for section in sections_of(config):
        given = [(key, section[key]) for key in keys if section.get(key) is not None]
        if given:
            return _agreed([(key, _of_layer(value, layer)) for key, value in given])
    return None


def _of_layer(value: Any, layer: int | None) -> Any:
    """The value for `layer` in a list with one for each; None if the list is too short."""
    if layer is None or not isinstance(value, list):
        return value
    return value[layer] if layer < len(value) else None


def _agreed(given: Sequence[tuple[str, Any]]) -> int | None:
    (first, top_k), *others = given
    if top_k is None:
        return None
    if not is_whole(top_k, 1):
        raise wrong_value(first, top_k, "a number of experts")
    for key, value in others:
        if not isinstance(value, list) and value not in (None, top_k):
            raise contradiction(first, top_k, key, value)
    return int(top_k)


def expert_activation(config: Mapping[str, Any]) -> ExpertActivation:
    """What the experts do between their products; CheckpointError for values of a wrong kind."""
    text = _checked_text_section(config)
    row = family_of(config)
    usual = row.activation if row is not None else ExpertActivation()
    limit = _positive(text, "activation limit")
    alpha = _positive(text, "activation alpha")
    if alpha is None and text.keys().isdisjoint(table.FAMILIES.keys("activation alpha")):
        alpha = usual.alpha
    if alpha is not None:  # gpt-oss and those that took it over
        usually = usual.limit if math.isfinite(usual.limit) else _BETA_LIMIT
        return ExpertActivation(usual.function, alpha, limit or usually)
    function = _name(text, "activation") or usual.function
    return ExpertActivation(function, None, limit or usual.limit)


def experts_have_gate(config: Mapping[str, Any]) -> bool | None:
    """By the family, or by the activation that config.json names; None where neither is known."""
    if (row := family_of(config)) is not None:
        return row.gated
    name = _name(text_section(config), "activation")
    return name not in _UNGATED_FUNCTIONS if name else None


def _checked_text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config.get("text_config", config), Mapping):
        raise wrong_value("text_config", config["text_config"], "an object")
    return text_section(config)


def _positive(text: Mapping[str, Any], setting: str) -> float | None:
    """A number above 0; None where there is none, or 0."""
    for key in table.FAMILIES.keys(setting):
        value = text.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_value(key, value, "a number")
        if not 0 <= value <= _LARGEST:
            raise wrong_value(key, value, "a positive float32 number")
        return float(value) or None
    return None


def _name(text: Mapping[str, Any], setting: str) -> str:
    """The first that is not empty; empty where there is none."""
    names = {key: text.get(key) for key in table.FAMILIES.keys(setting)}
    for key, name in names.items():
        if not isinstance(name, (str, type(None))):
            raise wrong_value(key, name, "a name")
    return next(filter(None, names.values()), "")
