"""Reasons why a checkpoint is read as it is: patterns of names, what was found next to the experts,
the settings of config.json that were used. For unknown names: a map to edit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.family import RouterSpec
from ktconv.families.names import (
    SharedExpert,
    norm_tensors,
    router_tensors,
    shared_expert_tensors,
    split_name,
)
from ktconv.source import Checkpoint, MoELayer
from ktconv.source.config import CONFIG_NAME
from ktconv.source.map_guess import guess_map
from ktconv.source.model_source import ModelSource
from ktconv.source.name_patterns import NamePattern, name_patterns
from ktconv.source.settings import ModelSettings
from ktconv.source.settings_used import settings_used
from ktconv.source.shards import read_shards, select_shards
from ktconv.source.types import ExpertMatrix, TensorRef
from ktconv.system.units import format_ranges

_LIKE_EXPERTS = re.compile(r"expert|moe")
_SHOWN = 30  # patterns of one kind in the text for people; JSON has all


# ---- names that nobody knows -------------------------------------------------------------


def explain_unknown(source: ModelSource, error: CheckpointError) -> dict[str, Any]:
    """Explain a checkpoint in which `open_checkpoint` found no experts, with the `error` it
    raised."""
    place = source.place()
    settings = ModelSettings.beside(source.config or place)
    tensors = list(read_shards(select_shards(place)).tensors)
    guess = guess_map(tensors, settings.checked, place.name)
    return {
        "schema": 1,
        "kind": "checkpoint with unknown names",
        "path": str(place),
        "family": settings.model_type,
        "reason": str(error),
        "nearest_family": guess.nearest,
        "likely_experts": [_facts(one) for one in guess.likely],
        "patterns": [_facts(one) for one in guess.patterns],
        "map": guess.map,
    }


def unknown_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The map, ready for a file; or patterns as comments where none could be guessed."""
    if facts["map"] is not None:
        yield from facts["map"].splitlines()
        return
    yield "# No group of tensors looks like experts. Patterns of all names:"
    for one in facts["patterns"]:
        yield f"#   {one['pattern']}: {one['described']}"


def _facts(pattern: NamePattern) -> dict[str, Any]:
    return {
        "pattern": pattern.text,
        "tensors": len(pattern.tensors),
        "bytes": pattern.nbytes,
        "dtypes": list(pattern.dtypes),
        "shapes": [list(shape) for shape in pattern.shapes[:4]],
        "described": pattern.described,
    }


# ---- known names -------------------------------------------------------------------------


def explain(checkpoint: Checkpoint) -> dict[str, Any]:
    """Explain how each part of an opened checkpoint was found; ready for JSON."""
    beside = _beside(checkpoint)
    others = name_patterns(checkpoint.other_tensors)
    used, ignored = settings_used(checkpoint)
    row = checkpoint.config.family
    return {
        "family_row": None if row is None else list(row.types),
        "experts": _experts(checkpoint),
        "beside_experts": [_facts(one) | {"what": what} for what, one in beside],
        "left_over": [_facts(one) for one in _left_over(others, [one for _, one in beside])],
        "other_patterns": [_facts(one) for one in others],
        "config_used": used,
        "config_ignored": ignored,
        "router": _router(checkpoint, beside),
    }


def _experts(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Layers that are found and stored in the same way, with the patterns of their tensors."""
    place = checkpoint.path.parent if checkpoint.is_gguf else checkpoint.path
    selection = select_shards(checkpoint.path if checkpoint.is_gguf else place)
    apart = {tensor.name for tensor in checkpoint.other_tensors}
    tensors = list(read_shards(selection).tensors)
    experts = [one for one in tensors if one.name not in apart]
    groups: dict[tuple[Any, ...], list[MoELayer]] = {}
    for layer in checkpoint.layers:
        found_as = re.sub(r"[0-9]+", "{}", layer.source)
        key = (_rule(checkpoint, layer), found_as, layer.is_mtp, stored_as(layer), layer.encoding)
        groups.setdefault(key, []).append(layer)
    found = []
    for (rule, found_as, is_mtp, stored, encoding), layers in groups.items():
        starts = tuple(_own_start(checkpoint, layer) for layer in layers)
        own = [one for one in experts if one.name.startswith(starts)]
        found.append(
            {
                "layers": format_ranges([layer.index for layer in layers]),
                "rule": rule,
                "found_as": found_as,
                "mtp": is_mtp,
                "stored": stored,
                "encoding": encoding,
                "patterns": [_facts(one) for one in name_patterns(own)],
            }
        )
    return found


def _rule(checkpoint: Checkpoint, layer: MoELayer) -> str:
    mapped = checkpoint.mapped
    if mapped is not None and layer.source in mapped.tables:
        return f"[{mapped.tables[layer.source].table}] of the map"
    return "names of GGUF files" if checkpoint.is_gguf else "names of known families"


def _own_start(checkpoint: Checkpoint, layer: MoELayer) -> str:
    """Beginning of the names of this layer's experts."""
    mapped = checkpoint.mapped and checkpoint.mapped.prefix(layer.source)
    return mapped or f"{layer.source}."


def stored_as(layer: MoELayer) -> str:
    """Arrangement of a layer's experts in tensors, in words."""
    first, last = layer.experts[0], layer.experts[-1]
    up, gate = first["up"], first.get("gate")
    stacked = len(layer.experts) > 1 and last["up"].tensor.name == up.tensor.name
    words = ["all experts in one tensor" if stacked else "each expert has tensors of its own"]
    if gate is None:
        words.append("without a gate")
    elif gate.tensor.name == up.tensor.name:
        words.append(f"gate and up in one tensor, {_order(gate, up)}")
    if up.col_stride != 1:
        words.append("stored [in, out]")
    return ", ".join(words)


def _order(gate: ExpertMatrix, up: ExpertMatrix) -> str:
    apart = abs(up.start - gate.start)
    step = up.row_stride // 2 if up.col_stride == 1 else 1
    if apart == step:
        return "interleaved"
    return "gate first" if gate.start < up.start else "up first"


def _beside(checkpoint: Checkpoint) -> list[tuple[str, NamePattern]]:
    """Routers, norms and shared experts of all layers by what they are."""
    by_name = {tensor.name: tensor for tensor in checkpoint.other_tensors}
    aliases = checkpoint.aliases
    found: dict[str, list[TensorRef]] = {}
    for layer in checkpoint.layers:
        for what, names in _names_beside(layer.source):
            own = [aliases.get(name, name) for name in names]
            there = next((by_name[name] for name in own if name in by_name), None)
            if there is not None:
                found.setdefault(what, []).append(there)
    return [(what, one) for what, tensors in found.items() for one in name_patterns(tensors)]


def _names_beside(source: str) -> Iterator[tuple[str, Sequence[str]]]:
    router = router_tensors(source)
    for name, found in asdict(router).items():
        yield "router" if name == "weight" else f"router {name.replace('_', ' ')}", found
    yield "norm", norm_tensors(source)
    shared = shared_expert_tensors(source)
    for name in SharedExpert.__struct_fields__:
        yield f"shared expert {name}", [getattr(one, name) for one in shared]


def _left_over(others: Sequence[NamePattern], beside: Sequence[NamePattern]) -> list[NamePattern]:
    """Other tensors that look like experts."""
    known = {tensor.name for one in beside for tensor in one.tensors}
    known |= {tensor.name for one in others for tensor in one.tensors if _is_beside(tensor.name)}
    latent = frozenset(table.FAMILIES.latent)  # between the model's width and the experts'
    return [
        one
        for one in others
        if _LIKE_EXPERTS.search(one.text)
        and "shared" not in one.text
        and latent.isdisjoint(one.text.split("."))
        and not any(tensor.name in known for tensor in one.tensors)
    ]


def _is_beside(name: str) -> bool:
    """Whether it is known to belong to all experts of a layer, as an output bias does."""
    found = split_name(name)
    return found is not None and found[1] in table.FAMILIES.beside


# ---- config.json -------------------------------------------------------------------------


def _router(checkpoint: Checkpoint, beside: Sequence[tuple[str, NamePattern]]) -> str:
    """The router of the first layer in words, or why it is not known."""
    corrected = any(what == "router correction" for what, _ in beside)
    try:
        found = checkpoint.config.find_router(checkpoint.layers[0].index, corrected)
    except CheckpointError as error:
        return f"not known: {error}"
    usual = RouterSpec(found.spec.scoring)
    changed = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in asdict(found.spec).items()
        if value != getattr(usual, name)
    ]
    inferred = f" (inferred from {found.inferred})" if found.inferred else ""
    return f"{found.spec.scoring}{inferred}: {', '.join(changed) or 'as usual'}"


# ---- for people --------------------------------------------------------------------------


def lines_of(explained: Mapping[str, Any]) -> Iterator[str]:
    """Lines of text for the result of `explain`."""
    row = explained["family_row"]
    known = f"the row of {', '.join(row)}" if row else f"model_type of {CONFIG_NAME} is not known"
    yield f"family: {known}"
    yield f"router: {explained['router']}"
    for group in explained["experts"]:
        mtp = " (MTP)" if group["mtp"] else ""
        yield f"layers {group['layers']}{mtp}: by {group['rule']}, found as {group['found_as']}"
        yield f"  {group['stored']}, {group['encoding']}"
        yield from _pattern_lines(group["patterns"])
    for title, key in (
        ("next to the experts:", "beside_experts"),
        ("left over, although the names look like experts:", "left_over"),
        ("all tensors that are no experts:", "other_patterns"),
    ):
        if explained[key]:
            yield title
            yield from _pattern_lines(explained[key])
    yield f"{CONFIG_NAME}, used:"
    for path, value in explained["config_used"].items():
        yield f"  {path} = {value!r:.100}"
    yield f"{CONFIG_NAME}, not used: {', '.join(explained['config_ignored']) or 'nothing'}"


def _pattern_lines(patterns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in patterns[:_SHOWN]:
        what = f"{one['what']}: " if "what" in one else ""
        yield f"  {what}{one['pattern']}  ({one['described']})"
    if len(patterns) > _SHOWN:
        yield f"  and {len(patterns) - _SHOWN} more patterns"
