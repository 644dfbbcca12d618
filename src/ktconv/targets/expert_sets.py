"""Sets of experts that run on the GPU, by layer: the file of --experts and --exclude-experts.

    {"schema": 1, "experts": {"3": [0, 5, 17], "4": [2]}, "experts_in_layer": {"3": 64, "4": 64}}

A layer that is not named has none of its experts in the set. `ktconv stats --write` makes such
files; they can be written by hand as well, and "experts_in_layer" can be left out. Where it is
there, models with other numbers of experts are refused: their ids are not those of the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ktconv.errors import CheckpointError, UsageError
from ktconv.source import MoELayer
from ktconv.source.strict_json import parse_object
from ktconv.system.regular_files import read_given
from ktconv.system.units import counted, format_ranges, parse_ranges
from ktconv.writer.option_files import WrittenFile

SCHEMA = 1
EXCLUDED = "exclude_experts"  # the option, in a manifest, that names the experts left out
COUNTS = "router statistics"  # the kind of document that `ktconv stats --json` prints

IN_LAYER = "experts_in_layer"  # key of a file

_FORM = 'write it like {"schema": 1, "experts": {"3": [0, 5, 17]}}'
_NUMBER = re.compile("0|[1-9][0-9]{0,5}")


class ExpertSet(Struct, frozen=True):
    """Ids of experts by layer, both ascending; a layer without any is not named."""

    layers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # How many experts the layers of the model have that these were chosen from, where it is known;
    # equal sets need not have the same.
    experts_in_layer: Mapping[int, int] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertSet) and self.layers == other.layers

    def __bool__(self) -> bool:
        return bool(self.layers)

    def of(self, layer: int) -> tuple[int, ...]:
        return self.layers.get(layer, ())

    @property
    def count(self) -> int:
        return sum(map(len, self.layers.values()))

    @property
    def sha256(self) -> str:
        """Checksum of the contents: equal for files that differ in spaces or order only."""
        return hashlib.sha256(
            json.dumps(self.as_dict(), separators=(",", ":")).encode()
        ).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """The choice, as a file has it."""
        return {
            "schema": SCHEMA,
            "experts": {str(layer): list(ids) for layer, ids in self.layers.items()},
        }

    @property
    def in_words(self) -> str:
        """3 experts of 2 layers"""
        return f"{counted(self.count, 'expert')} of {counted(len(self.layers), 'layer')}"

    def as_record(self) -> dict[str, Any]:
        """Record for a manifest: {"sha256": "...", "layers": {"3": "0,5,17-20"}}; empty for no
        expert."""
        if not self:
            return {}
        layers = {str(layer): format_ranges(list(ids)) for layer, ids in self.layers.items()}
        return {"sha256": self.sha256, "layers": layers}


def expert_set(
    layers: Mapping[int, Sequence[int]], experts_in_layer: Mapping[int, int] | None = None
) -> ExpertSet:
    """Puts ids in order and leaves out layers without any."""
    named = sorted(layer for layer, ids in layers.items() if ids)
    chosen = {layer: tuple(sorted(layers[layer])) for layer in named}
    return ExpertSet(chosen, experts_in_layer or {})


def set_of_record(record: object, where: str) -> ExpertSet:
    """The inverse of `ExpertSet.as_record`; CheckpointError names `where` for anything else."""
    ranges = record.get("layers", {}) if isinstance(record, dict) else None
    if isinstance(ranges, dict) and all(map(_is_ranges, ranges, ranges.values())):
        try:
            found = expert_set({int(layer): parse_ranges(ranges[layer], "") for layer in ranges})
        except UsageError:
            found = expert_set({})
        if found.as_record() == record:
            return found
    raise CheckpointError(f"{where} does not contain a valid set of experts")


def _is_ranges(layer: str, text: object) -> bool:
    return _NUMBER.fullmatch(layer) is not None and isinstance(text, str)


def others(chosen: ExpertSet, experts: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Ids that are not chosen, by layer; `experts` is the number of experts by layer."""
    ids = {layer: frozenset(chosen.of(layer)) for layer in experts}
    return {
        layer: tuple(number for number in range(count) if number not in ids[layer])
        for layer, count in experts.items()
    }


# ---- files -----------------------------------------------------------------------------


def read_expert_set(path: Path, option: str = "--experts") -> ExpertSet:
    """Read FILE of `option`. Raises a KtconvError that names what is wrong with it."""
    if not path.is_file():
        raise UsageError(f"{option}: {path} is not a file", _FORM)
    content = parse_object(read_given(path, option, _FORM), str(path), _FORM)
    if content.get("kind") == COUNTS:
        raise UsageError(
            f"{path} contains counts, not a set of experts",
            f"select experts with: ktconv stats {path} --hot N --write FILE.json",
        )
    if content.get("schema") != SCHEMA or type(content["schema"]) is not int:
        raise UsageError(f"{path} has no schema {SCHEMA}", _FORM)
    if unknown := sorted(content.keys() - {"schema", "experts", IN_LAYER}):
        raise UsageError(f"{path} has {unknown[0]!r}, which is not a known key", _FORM)
    layers = content.get("experts")
    if not isinstance(layers, dict):
        raise UsageError(f"{path} has no object of experts by layer", _FORM)
    if not layers:
        raise UsageError(f"{path} contains no expert", _FORM)
    chosen = {_layer(path, key): _ids(path, key, ids) for key, ids in layers.items()}
    return expert_set(chosen, _experts_in_layer(path, content.get(IN_LAYER, {})))


def _experts_in_layer(path: Path, counts: object) -> dict[int, int]:
    if not isinstance(counts, dict):
        raise UsageError(f"{path} has no object of numbers in {IN_LAYER!r}", _FORM)
    for layer, count in counts.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"{path}: {count!r} is not how many experts layer {layer} has", _FORM)
    return {_layer(path, key): count for key, count in counts.items()}


def _layer(path: Path, key: str) -> int:
    if not _NUMBER.fullmatch(key):
        raise UsageError(f"{path}: layer {key!r} is not a number", _FORM)
    return int(key)


def _ids(path: Path, layer: str, ids: object) -> list[int]:
    if not isinstance(ids, list):
        raise UsageError(f"{path}: the experts of layer {layer} are not a list", _FORM)
    if not ids:
        raise UsageError(
            f"{path}: the list of layer {layer} is empty", "omit the layer if it has none"
        )
    for number in ids:
        if type(number) is not int or number < 0:
            raise UsageError(f"{path}: {number!r} of layer {layer} is not an expert id", _FORM)
    if len(set(ids)) < len(ids):
        twice = next(number for at, number in enumerate(ids) if number in ids[:at])
        raise UsageError(f"{path} names expert {twice} of layer {layer} twice", "name it once")
    return ids


def check_expert_set(chosen: ExpertSet, experts: Mapping[int, int], path: Path | str) -> None:
    """UsageError unless every layer and id is one of the model's, and the set was chosen from as
    many: `experts` is their number by layer."""
    for layer, count in chosen.experts_in_layer.items():
        if experts.get(layer, count) != count:
            raise UsageError(
                f"{path} was made for {counted(count, 'expert')} in layer {layer}, and this model "
                f"has {experts[layer]}, whose ids are others",
                "make it again for this model: ktconv stats MODEL --text TEXT --write FILE",
            )
    for layer, ids in chosen.layers.items():
        if layer not in experts:
            raise UsageError(
                f"{path} names layer {layer}, which is not an MoE layer of this model",
                f"MoE layers are {format_ranges(list(experts))}",
            )
        if ids[-1] >= experts[layer]:
            raise UsageError(
                f"{path} names expert {ids[-1]} of layer {layer}, but it has {experts[layer]}",
                f"experts are 0 to {experts[layer] - 1}",
            )


def remaining(excluded: ExpertSet, layers: Sequence[MoELayer]) -> dict[int, tuple[int, ...]]:
    """The experts that remain of the layers that some are excluded from, by layer.

    Raises UsageError for experts that these layers do not have, and where none would remain.
    """
    experts = {layer.index: len(layer.experts) for layer in layers}
    check_expert_set(excluded, experts, "--exclude-experts")
    left = others(excluded, {layer: experts[layer] for layer in excluded.layers})
    for layer, ids in left.items():
        if not ids:
            raise UsageError(
                f"--exclude-experts excludes all {experts[layer]} of the experts of layer {layer}",
                "keep at least one expert of each layer for the CPU",
            )
    return left


def expert_set_file(path: Path) -> WrittenFile:
    """FILE of --write: it replaces sets that ktconv wrote, and not those written by hand."""
    return WrittenFile(path, "--write", "a set of experts that ktconv wrote", _is_written)


def _is_written(path: Path) -> bool:
    return read_given(path, "--write", _FORM) == _text(read_expert_set(path))


def write_expert_set(chosen: ExpertSet, path: Path) -> None:
    """Write FILE for --experts and --exclude-experts, one layer per line. UsageError where there
    is another file, or a model around it."""
    expert_set_file(path).write(_text(chosen))


def _text(chosen: ExpertSet) -> bytes:
    lines = [f'  "{layer}": {json.dumps(list(ids))}' for layer, ids in chosen.layers.items()]
    text = f'{{"schema": {SCHEMA}, "experts": {{\n' + ",\n".join(lines) + "\n}"
    if chosen.experts_in_layer:
        counts = {str(layer): count for layer, count in sorted(chosen.experts_in_layer.items())}
        text += f',\n "{IN_LAYER}": {json.dumps(counts)}'
    return f"{text}}}\n".encode()
