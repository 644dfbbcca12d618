"""Experts that the patterns of a map find get usual names before anything else sees them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from ktconv.errors import CheckpointError
from ktconv.families.family import USUAL
from ktconv.families.names import (
    norm_tensors,
    parse_source,
    router_tensors,
    shared_expert_tensors,
    split_name,
)
from ktconv.source.encodings import PARTS, UNDERSCORED
from ktconv.source.encodings.base import WEIGHT
from ktconv.source.naming_map import ROUTER_KEYS, SHARED_KEYS, ExpertNames, NamingMap, Pattern
from ktconv.source.stacks import Split, Stack, split_tensors
from ktconv.source.types import MoELayer, TensorRef
from ktconv.system.units import counted

_WORDS: Mapping[str, str] = {
    "gate": USUAL.gate, "up": USUAL.up, "down": USUAL.down, "gate_up": USUAL.gate_up or "",
}  # fmt: skip
_KEYS = {word: key for key, word in _WORDS.items()}
_LAYERS = "model.layers."  # how usual names of a map's layers begin
_HINT = "Correct the map; `ktconv inspect MODEL --explain` prints one to start from."
_NAMES = 3  # that an error shows


class Mapped(Struct, frozen=True):
    """A map and what it found in a checkpoint."""

    naming: NamingMap
    tables: Mapping[str, ExpertNames]  # by the usual name of each layer's experts
    numbers: Mapping[str, int]  # the number that names have for that layer
    aliases: Mapping[str, str] = field(default_factory=dict)  # usual names of other tensors
    known: str | None = None  # one of its tensors that is found without the map, too
    elsewhere: str | None = None  # experts of another tower, which are other tensors

    def prefix(self, source: str) -> str | None:
        """Beginning of the names of all tensors of a layer; None if the map does not describe
        it."""
        if source not in self.tables:
            return None
        pattern = next(iter(self.tables[source].all_patterns))
        end = pattern.text.index("{layer}") + len("{layer}")
        separator = pattern.text[end : end + 1]
        return pattern.text[:end].replace("{layer}", str(self.numbers[source])) + (
            separator if separator in (".", "_", "/") else ""
        )

    def spelt(self, message: str) -> str:
        """A message about usual names with the checkpoint's own ones instead."""
        return _USUAL_NAME.sub(self._own_name, message)

    def _own_name(self, match: re.Match[str]) -> str:
        found = self.tables.get(match["source"])
        if found is None:
            return match[0]
        number = self.numbers[match["source"]]
        patterns = found.patterns.get(_KEYS.get(match["word"] or match["stacked"] or "", ""), {})
        end = "" if match["part"] == f".{WEIGHT}" else match["part"] or ""
        if patterns:
            pattern = patterns.get(None) or next(iter(patterns.values()))
            expert = int(match["expert"] or found.expert_offset) - found.expert_offset
            return pattern.name(number, expert) + end
        begins = {pattern.text.partition("{expert}")[0] for pattern in found.all_patterns}
        common = re.sub(r"[^./]*$", "", _common(begins)).rstrip("./")
        return common.replace("{layer}", str(number)) + end


_USUAL_NAME = re.compile(
    r"(?P<source>(?:model|mtp)\.layers\.[0-9]+\.mlp\.experts)"
    rf"(?:\.(?P<expert>[0-9]+)\.(?P<word>{'|'.join(_KEYS)})|\.(?P<stacked>{'|'.join(_KEYS)}))?"
    r"(?P<part>\.[a-z_*]+)?"
)


def _common(texts: Iterable[str]) -> str:
    first, *rest = sorted(texts)
    last = rest[-1] if rest else first
    same = next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    return first[:same]


class _Match(Struct, frozen=True):
    table: ExpertNames
    key: str
    pattern: Pattern
    part: str
    layer: int  # as the name has it
    expert: int


def split_mapped(tensors: Sequence[TensorRef], naming: NamingMap) -> tuple[Split, Mapped]:
    """Split tensors like `split_tensors`, with the experts that the map describes before those
    found without it.

    Raises CheckpointError where patterns match nothing, or several the same tensor.
    """
    stacks: dict[str, Stack] = {}
    tables: dict[str, ExpertNames] = {}
    numbers: dict[str, int] = {}
    seen: set[str] = set()
    known = None
    rest = []
    for tensor in tensors:
        match = _only_match(tensor, naming)
        if match is None:
            rest.append(tensor)
            continue
        source = _source(match, tensor)
        if source not in stacks:
            path = parse_source(source)
            assert path is not None, "a usual name"
            stacks[source] = Stack(path, order=match.table.order, stored=match.table.stored)
            tables[source], numbers[source] = match.table, match.layer
            parts = split_name(tensor.name)
            if parts is not None and parse_source(parts[0]) is not None:
                known = known or tensor.name
        _add(stacks[source], match, tensor)
        seen.add(match.pattern.text)
    _check_all_matched(naming, seen, tensors)
    found = split_tensors(rest)
    found, elsewhere = _without_other_towers(found, naming)
    _check_not_twice(found, stacks)
    split = Split([*stacks.values(), *found.stacks], found.others, found.unrecognised)
    aliases = _aliases(naming, tables, numbers, split)
    return split, Mapped(naming, tables, numbers, aliases, known, elsewhere)


def _only_match(tensor: TensorRef, naming: NamingMap) -> _Match | None:
    found = list(_matches(tensor.name, naming))
    if len(found) > 1:
        first, second = (f"[{one.table.table}] {one.key}" for one in found[:2])
        raise CheckpointError(f"{tensor.name} matches {first} and {second} of the map", _HINT)
    return found[0] if found else None


def _matches(name: str, naming: NamingMap) -> Iterator[_Match]:
    for one in naming.tables:
        for key, patterns in one.patterns.items():
            for part, pattern in patterns.items():
                match = pattern.regex.fullmatch(name)
                if match is None:
                    continue
                end = _part(match["end"]) if part is None else None
                if part is not None and match["end"] in (None, f".{WEIGHT}"):
                    end = part
                if end is not None:
                    expert = int(match["expert"]) if pattern.numbered else 0
                    yield _Match(one, key, pattern, end, int(match["layer"]), expert)


def _part(end: str | None) -> str | None:
    """The part of an encoding that a name with this end is; None for a name of another kind."""
    if end is None:
        return WEIGHT
    if end[0] == "_":
        return UNDERSCORED.get(end)
    return end[1:] if "." not in end[1:] or end[1:] in PARTS else None


def _source(match: _Match, tensor: TensorRef) -> str:
    """model.layers.3.mlp.experts: the usual name for the layer of the map's number."""
    names, layer = match.table, match.layer
    if names.layers is not None:
        if layer >= len(names.layers):
            raise CheckpointError(
                f"{tensor.name} has the number {layer}, but [{names.table}] layers of the map "
                f"lists {len(names.layers)}",
                _HINT,
            )
        layer = names.layers[layer]
    else:
        layer += names.layer_offset
    if layer < 0:
        raise CheckpointError(f"{tensor.name} is layer {layer} by layer_offset of the map", _HINT)
    return f"{'mtp.layers.' if names.in_mtp else _LAYERS}{layer}.mlp.experts"


def _add(stack: Stack, match: _Match, tensor: TensorRef) -> None:
    word = _WORDS[match.key]
    rest = f"{word}.{match.part}"
    if match.pattern.numbered:
        expert = match.expert + match.table.expert_offset
        if expert < 0:
            raise CheckpointError(
                f"{tensor.name} is expert {expert} by expert_offset of the map", _HINT
            )
        rest = f"{expert}.{rest}"
    if rest in stack.tensors:
        raise CheckpointError(
            f"{stack.tensors[rest].name} and {tensor.name} are the same weight by the map", _HINT
        )
    stack.tensors[rest] = tensor


def _check_all_matched(naming: NamingMap, seen: set[str], tensors: Sequence[TensorRef]) -> None:
    for one in naming.tables:
        for key, patterns in one.patterns.items():
            for part, pattern in patterns.items():
                if part is not None and part not in PARTS:
                    raise CheckpointError(
                        f"[{one.table}] {key} of the map has the part {part!r:.60}, which no "
                        "encoding has",
                        f"Known are {', '.join(sorted(PARTS))}.",
                    )
                if pattern.text not in seen:
                    raise _nothing(f"[{one.table}] {key}", pattern, tensors)


def _nothing(what: str, pattern: Pattern, tensors: Sequence[TensorRef]) -> CheckpointError:
    near = nearest_names(pattern.text, (tensor.name for tensor in tensors))
    tail = f"; the nearest names are {', '.join(near)}" if near else ""
    return CheckpointError(f"{what} of the map, {pattern.text}, matches no tensor{tail}", _HINT)


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The first names of the kinds that most resemble a pattern."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(template(name.removesuffix(f".{WEIGHT}")), name)
    wanted = re.sub(r"\{\w+\}|[0-9]+", "{}", pattern)
    near = difflib.get_close_matches(wanted, list(kinds)[:1000], n=_NAMES, cutoff=0.3)
    return [kinds[kind] for kind in near]


def template(name: str) -> str:
    """decoder.h.3.moe.w_gate.7 -> decoder.h.{}.moe.w_gate.{}"""
    return re.sub(r"(?<![A-Za-z])[0-9]+", "{}", name)


def _without_other_towers(found: Split, naming: NamingMap) -> tuple[Split, str | None]:
    """Split without decoder layers of another list than that of the map's usual names: the map
    describes the language model's. Also where the first of them is."""
    if naming.experts is None:
        return found, None
    own = [one for one in found.stacks if one.path.in_mtp or one.path.layer.startswith(_LAYERS)]
    left = [one for one in found.stacks if one not in own]
    gone = [tensor for stack in left for tensor in stack.tensors.values()]
    elsewhere = left[0].source if left else None
    return Split(own, [*found.others, *gone], found.unrecognised), elsewhere


def _check_not_twice(found: Split, mapped: Mapping[str, Stack]) -> None:
    """CheckpointError if a layer that the map describes has other experts too."""
    layers = {stack.path.layer: stack for stack in mapped.values()}
    for stack in found.stacks:
        other = layers.get(stack.path.layer)
        if other is not None:
            mine, theirs = (next(iter(one.tensors.values())).name for one in (other, stack))
            raise CheckpointError(
                f"layer {stack.path.number} has two sets of experts: {mine} by the map, and "
                f"{theirs}, which is found without it",
                "Correct the map so that it describes other layers or these tensors too.",
            )


def _aliases(
    naming: NamingMap,
    tables: Mapping[str, ExpertNames],
    numbers: Mapping[str, int],
    split: Split,
) -> Mapping[str, str]:
    """Usual name of a router, norm or shared expert -> the name that the tensor has."""
    aliases: dict[str, str] = {}
    seen = set()
    names = {tensor.name for tensor in split.others}
    for source, table in tables.items():
        usual = _usual_names(source)
        for key, pattern in table.others.items():
            name = pattern.name(numbers[source])
            own = next((one for one in (f"{name}.{WEIGHT}", name) if one in names), None)
            if own is not None:
                aliases[usual[key]] = own
                seen.add(pattern.text)
    for table in naming.tables:
        for key, pattern in table.others.items():
            if pattern.text not in seen:
                raise _nothing(f"[{table.others_table}] {key}", pattern, split.others)
    return aliases


def _usual_names(source: str) -> Mapping[str, str]:
    """Usual names of the keys of [others]."""
    router, shared = router_tensors(source), shared_expert_tensors(source)[0]
    return {
        **{key: getattr(router, part)[0] for part, key in ROUTER_KEYS.items()},
        "norm": norm_tensors(source)[0],
        **{key: getattr(shared, part) for part, key in SHARED_KEYS.items()},
    }


def check_encodings(layers: Iterable[MoELayer], mapped: Mapped) -> None:
    """CheckpointError for a layer with another encoding than the map says."""
    for layer in layers:
        wanted = mapped.tables[layer.source].encoding if layer.source in mapped.tables else None
        if wanted is not None and layer.encoding != wanted:
            raise CheckpointError(
                f"{layer.source}.* is {layer.encoding}, but the map says {wanted!r:.60}", _HINT
            )


def notes_of(mapped: Mapped, config: Mapping[str, object]) -> list[str]:
    """Notes for the user about a map that was used. `config`: config.json without it."""
    layers = len(mapped.tables)
    notes = [f"names of experts in {counted(layers, 'layer')} are by --map"]
    if mapped.known is not None:
        notes.append(f"{mapped.known} has a name that is known without --map; the map decides")
    if mapped.elsewhere is not None:
        notes.append(f"experts under {mapped.elsewhere}, which --map leaves out, are other tensors")
    if mapped.naming.like:
        notes.append(f"router and activation are those of {mapped.naming.like}, by --map")
    for key, value in mapped.naming.config.items():
        if key in config and config[key] != value:
            notes.append(f"--map says {key} {value!r:.60}, config.json {config[key]!r:.60}")
    return notes
