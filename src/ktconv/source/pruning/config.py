"""config.json of a model with fewer experts: counts wherever a family keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ktconv.families import table
from ktconv.families.config import Config
from ktconv.source.config import ModelConfig

Content = dict[str, Any]
Rename = Callable[[str], str | None]  # the new name of a tensor or module; None: it is gone
_QUANTIZATION = ("quantization_config", "compression_config")


def pruned_content(
    content: Mapping[str, Any],
    config: ModelConfig,
    experts: Mapping[int, int],
    groups: tuple[int, int] | None,
    mtp_left_out: bool,
    rename: Rename,
) -> Content:
    """The content of config.json with these numbers of experts by layer.

    `config`: what the content says. `groups`: the number of groups of the router, old and new.
    """
    model = Config(content)
    known = table.FAMILIES
    keys = {name: known.keys(name, model.family) for name in ("experts", "experts of each layer")}
    new: Content = _copied(content)
    sections = _sections(new)
    old, most = config.num_experts, max(experts.values())
    decoder = config.num_layers.value if config.num_layers else max(experts) + 1
    uneven = len(set(experts.values())) > 1
    found = listed = False
    for section in sections:
        for key in keys["experts"]:
            value = section.get(key)
            if isinstance(value, list):
                section[key], listed = _relisted(value, experts), True
            elif type(value) is int and old is not None and value == old.value:
                section[key], found = most, True
        for key in keys["experts of each layer"]:
            if isinstance(section.get(key), list):
                section[key], listed = _relisted(section[key], experts), True
    text = sections[0]
    if not found and not listed:
        text[keys["experts"][0]] = most
    if uneven and not listed:
        where, key = next(
            ((one, key) for one in sections for key in keys["experts"] if key in one),
            (text, keys["experts"][0]),
        )
        each = f"{key}_per_layer"
        each = each if each in keys["experts of each layer"] else "num_experts_per_layer"
        where[each] = [experts.get(layer, most) for layer in range(decoder)]
    if groups is not None and groups[0] != groups[1]:
        _replace(sections, known.keys("n_group", model.family), *groups)
    if mtp_left_out:
        _without_mtp(sections, known.keys("MTP layers", model.family), config)
    for section in sections:
        for key in _QUANTIZATION:
            if key in section:
                section[key] = renamed(section[key], rename)
    return new


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _sections(content: Content) -> list[Content]:
    """The sections with settings of the language model: its own first, with one for its experts
    (DBRX), and the whole file last."""
    path = [content]
    inner: Content | None = content
    while inner is not None:
        inside = (inner.get(key) for key in table.FAMILIES.keys("text section"))
        inner = next((one for one in inside if isinstance(one, dict)), None)
        if inner is not None:
            path.append(inner)
    text = path[-1]
    moe = (text.get(key) for key in table.FAMILIES.keys("MoE section"))
    experts = next((one for one in moe if isinstance(one, dict)), None)
    return [text, *([] if experts is None else [experts]), *reversed(path[:-1])]


def _relisted(values: list[Any], experts: Mapping[int, int]) -> list[Any]:
    """A list with a number for each layer."""
    return [experts.get(layer, value) for layer, value in enumerate(values)]


def _replace(sections: list[Content], keys: tuple[str, ...], old: int, new: int) -> None:
    for section in sections:
        for key in keys:
            if section.get(key) == old:
                section[key] = new


def _without_mtp(sections: list[Content], keys: tuple[str, ...], config: ModelConfig) -> None:
    """No MTP layers any more, also in lists that have a value for each layer."""
    layers = config.num_layers.value if config.num_layers else None
    for section in sections:
        for key in keys:
            if type(section.get(key)) is int:
                section[key] = 0
        for key, value in section.items():
            if isinstance(value, list) and layers and len(value) == layers + config.num_mtp_layers:
                section[key] = value[:layers]


def renamed(value: Any, rename: Rename) -> Any:
    """A section of quantization in which modules have their new names, and those that are gone are
    missing, in lists and as keys."""
    if isinstance(value, dict):
        keys = {key: rename(key) for key in value}
        return {
            new: renamed(one, rename)
            for key, one in value.items()
            if (new := keys[key]) is not None
        }
    if isinstance(value, list):
        names = ((rename(one) if isinstance(one, str) else one) for one in value)
        return [
            renamed(new, rename) for one, new in zip(value, names, strict=True) if new is not None
        ]
    return value
