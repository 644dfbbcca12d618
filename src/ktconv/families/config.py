"""The one reader of config.json: settings by the names that families have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.families import table
from ktconv.families.config_values import contradiction, is_whole, wrong_value
from ktconv.families.family import Family

USUAL_TOP_K = 8  # where config.json does not say


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's section of config.json, which is all of it for a text model.

    Settings of a section of its own for the experts (DBRX) are among it.
    """
    section: Any = config
    while section is not None:
        config = section
        inner = (config.get(key) for key in table.FAMILIES.keys("text section"))
        section = next((one for one in inner if isinstance(one, dict)), None)
    inside = (config.get(key) for key in table.FAMILIES.keys("MoE section"))
    experts = next((one for one in inside if isinstance(one, dict)), None)
    return config if experts is None else {**experts, **config}


def sections_of(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The text section, then the whole config if that is different; the first takes precedence."""
    text = text_section(config)
    return (text,) if text is config else (text, config)


def value_of(section: Mapping[str, Any], setting: str, family: Family | None = None) -> Any:
    """The value under the first of the setting's names that is present, those of `family` first;
    None if none is."""
    given = (section.get(key) for key in table.FAMILIES.keys(setting, family))
    return next((value for value in given if value is not None), None)


def type_of(config: Mapping[str, Any]) -> str:
    """The model_type of this config.json's text section, which may leave it to the whole model
    (DeepSeek-VL); without "_text", and empty where there is none."""
    kinds = (value_of(section, "model type") for section in sections_of(config))
    found = next((kind for kind in kinds if kind), "")
    return str(found).removesuffix("_text")


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The row of the table for this config.json's text section."""
    return table.FAMILIES.of(type_of(config))


def top_k_of(config: Mapping[str, Any], layer: int | None = None) -> int | None:
    """How many experts a token goes to in `layer`; None where config.json does not say.

    The first section with any of the keys decides, and in it the first key in the order of
    `Families.keys`; a list that is too short for `layer` decides that nothing is said. Raises
    CheckpointError for a value that is not a count, such as a list without a `layer`, and where
    keys of one section disagree.
    """
    checked_text_section(config)
    keys = table.FAMILIES.keys("top_k", family_of(config))
    for section in sections_of(config):
        given = [(key, section[key]) for key in keys if section.get(key) is not None]
        if given:
            return _agreed([(key, of_layer(value, layer)) for key, value in given])
    return None


def of_layer(value: Any, layer: int | None) -> Any:
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


def checked_text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`text_section`; CheckpointError for a text_config that is no object."""
    if not isinstance(config.get("text_config"), (Mapping, type(None))):
        raise wrong_value("text_config", config["text_config"], "an object")
    return text_section(config)
