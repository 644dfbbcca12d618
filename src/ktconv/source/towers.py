"""Models with several towers that have experts: which one is converted, and its config.json.

A tower is a list of layers: thinker.model.layers and talker.model.layers, or model.layers and
vision_encoder.blocks. Ernie-VL's towers share their layers: of the numbered experts the first ones
are the text model's, the others the vision model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.families.config import Config
from ktconv.families.family import Family
from ktconv.source.stacks import Split, Stack

MODALITIES = ("text", "vision")
_SHARED = ("experts", "intermediate size", "top_k", "first MoE layer", "last MoE layer")


class ChosenTower(Struct, frozen=True):
    """The tower that is converted of a model with several."""

    name: str
    split: Split  # of others, the experts are other tensors
    config: Config  # config.json with the tower's section as the text model's
    first_expert: int  # the number in names of what is expert 0 here
    notes: Sequence[str]


def choose_tower(split: Split, config: Config, tower: str | None) -> ChosenTower | None:
    """The tower called `tower`, else the language model's; None where there is only one.

    Raises UsageError for a tower that is not there, CheckpointError where `tower` is None and
    nothing says which is the language model's.
    """
    lists = _lists_of_layers(split.stacks)
    if len(lists) > 1:
        return _of_lists(split, config, tower, lists)
    counts = _modalities(split.stacks, config)
    if counts is not None:
        return _of_modalities(split, config, tower, counts)
    if tower is not None:
        raise UsageError(
            f"--tower {tower}: the experts of this model are all in one tower", "omit --tower"
        )
    return None


def tower_config(content: Mapping[str, Any], tower: str | None) -> Config:
    """config.json with the tower's section as the text model's, where that is another; for outputs,
    whose manifest names the tower."""
    config = Config(content)
    family = config.family
    if tower is None or (family is not None and family.tower == tower):
        return config
    if tower in MODALITIES and _modalities((), config) is not None:
        return Config(_of_modality(config, MODALITIES.index(tower)))
    section = _section(content, tower)
    return config if section is None else Config(_with_text(content, section))


def _chosen(tower: str | None, usual: str | None, names: Sequence[str], where: str) -> str:
    listed = ", ".join(names)
    if tower is not None and tower not in names:
        raise UsageError(
            f"--tower {tower}: the model has experts in the towers {listed}", "name one of these"
        )
    found = tower or usual
    if found is None:
        raise CheckpointError(
            f"the model has experts in the towers {listed} ({where}), and nothing says which of "
            "them is the language model",
            "Choose one with --tower NAME.",
        )
    return found


def _notes(name: str, names: Iterable[str]) -> list[str]:
    others = ", ".join(one for one in names if one != name)
    return [
        f"experts of the tower {name} are converted; those of {others} are other tensors here "
        "(--tower chooses)"
    ]


# ---- towers of their own -------------------------------------------------------------------


def _lists_of_layers(stacks: Sequence[Stack]) -> dict[tuple[str, ...], list[Stack]]:
    """The decoder layers' stacks by the words before their numbers: model, layers."""
    found: dict[tuple[str, ...], list[Stack]] = {}
    for stack in stacks:
        if not stack.path.in_mtp:
            found.setdefault(_words(stack), []).append(stack)
    return found


def _words(stack: Stack) -> tuple[str, ...]:
    return tuple(stack.path.layer.split(".")[:-1])


def _names(lists: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Short names: the first word that they do not share, or all from there on."""
    paths = list(lists)
    alike = (len(set(words)) == 1 for words in zip(*paths, strict=False))
    shared = sum(takewhile(bool, alike))
    short = {path: path[shared] if len(path) > shared else path[-1] for path in paths}
    unique = len(set(short.values())) == len(short)
    return {short[path] if unique else ".".join(path[shared:] or path): path for path in paths}


def _of_lists(
    split: Split,
    config: Config,
    tower: str | None,
    lists: Mapping[tuple[str, ...], Sequence[Stack]],
) -> ChosenTower:
    names = _names(lists)
    usual = _language_model(names, config.family)
    where = ", ".join(stacks[0].source for stacks in lists.values())
    name = _chosen(tower, usual, list(names), where)
    kept: list[Stack] = []
    left: list[Stack] = []
    for stack in split.stacks:
        of = _tower_of(stack, names) or usual or name
        (kept if of == name else left).append(stack)
    gone = [tensor for stack in left for tensor in stack.tensors.values()]
    others = Split(kept, [*split.others, *gone], split.unrecognised)
    section = config if name == usual else Config(_of_section(config.content, name))
    return ChosenTower(name, others, section, 0, _notes(name, names))


def _tower_of(stack: Stack, names: Mapping[str, tuple[str, ...]]) -> str | None:
    """The tower that a stack is in; None for an MTP layer outside of all."""
    words = _words(stack)
    if not stack.path.in_mtp:
        return next(name for name, path in names.items() if path == words)
    return next((name for name in names if name in words), None)


def _language_model(names: Mapping[str, tuple[str, ...]], family: Family | None) -> str | None:
    """Language model by the family's name for it, or for the list of its layers."""
    if family is None:
        return None
    if family.tower in names:
        return family.tower
    own = [name for name, path in names.items() if path[-1] == family.layers]
    return own[0] if len(own) == 1 else None


def _of_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """config.json with the section of a tower in place of the text model's."""
    section = _section(config, name)
    if section is None:
        raise CheckpointError(
            f"config.json has no section for the tower {name} (looked for "
            f"{' and '.join(_section_names(name))})",
            "Copy the config.json that belongs to this checkpoint next to its weights.",
        )
    return _with_text(config, section)


def _section_names(tower: str) -> Sequence[str]:
    """vision_encoder_config, vision_config"""
    return tuple(dict.fromkeys((f"{tower}_config", f"{tower.partition('_')[0]}_config")))


def _section(config: Mapping[str, Any], tower: str) -> Mapping[str, Any] | None:
    found = (config.get(key) for key in _section_names(tower))
    return next((one for one in found if isinstance(one, dict)), None)


def _with_text(config: Mapping[str, Any], section: Mapping[str, Any]) -> Mapping[str, Any]:
    sections = table.FAMILIES.keys("text section")
    return {key: value for key, value in config.items() if key not in sections} | {
        "text_config": dict(section)
    }


# ---- towers in one list of experts -----------------------------------------------------------


def _modalities(stacks: Sequence[Stack], config: Config) -> tuple[int, int] | None:
    """Numbers of experts that the text model and the vision model have in each layer; None where
    config.json does not give two sizes of an expert, or has as many layers."""
    text, family, known = config.text, config.family, table.FAMILIES
    layers = next((text[key] for key in known.keys("layers") if key in text), None)
    sizes = [text.get(key) for key in known.keys("intermediate size")]
    if not any(isinstance(one, list) and len(one) == 2 for one in sizes):
        return None
    if layers == 2 and not (family is not None and family.modalities):
        return None  # one for each layer
    given = [text[key] for key in known.keys("experts") if text.get(key) is not None]
    counts = next((one if isinstance(one, list) else [one, one] for one in given), None)
    if counts is None:
        highest = max((max(_numbers(stack), default=-1) for stack in stacks), default=-1)
        counts = [(highest + 1) // 2] * 2
    if len(counts) != 2 or any(type(one) is not int or one < 0 for one in counts):
        return None
    return counts[0], counts[1]


def _numbers(stack: Stack) -> list[int]:
    first = (rest.partition(".")[0] for rest in stack.tensors)
    return [int(number) for number in first if number.isdecimal() and len(number) < 7]


def _of_modalities(
    split: Split, config: Config, tower: str | None, counts: tuple[int, int]
) -> ChosenTower:
    name = _chosen(tower, MODALITIES[0], MODALITIES, "")
    which = MODALITIES.index(name)
    first = counts[0] if which else 0
    kept, gone = [], []
    for stack in split.stacks:
        own = {}
        for rest, tensor in stack.tensors.items():
            number, _, tail = rest.partition(".")
            index = int(number) if number.isdecimal() and len(number) < 7 else -1
            if index < 0 or index >= sum(counts):
                own[rest] = tensor  # which the layer's checks will name
            elif first <= index < first + counts[which]:
                own[f"{index - first}.{tail}"] = tensor
            else:
                gone.append(tensor)
        if own:
            kept.append(replace(stack, tensors=own))
    others = Split(kept, [*split.others, *gone], split.unrecognised)
    section = Config(_of_modality(config, which))
    return ChosenTower(name, others, section, first, _notes(name, MODALITIES))


def _of_modality(config: Config, which: int) -> Mapping[str, Any]:
    """config.json with the numbers of one tower, where it lists those of both."""
    text = config.text
    keys = {key for setting in _SHARED for key in table.FAMILIES.keys(setting)}
    section = {
        key: value[which] if key in keys and isinstance(value, list) and len(value) == 2 else value
        for key, value in text.items()
    }
    return section if text is config.content else _with_text(config.content, section)
