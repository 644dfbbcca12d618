"""The experts of each layer that stay: the file of --prune, and its record in manifests.

    {"kind": "kept experts", "schema": 1, "layers": {"3": {"experts": 16, "kept": [0, 2, 5]}},
     "left_out": [4]}

`kept` are the ids of the model, ascending: the place of an id in this list is the expert's new id.
Layers that are not named keep all of their experts; those of `left_out`, for multi-token
prediction, are left out as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct

from ktconv.errors import CheckpointError, UsageError
from ktconv.source.strict_json import parse_object
from ktconv.system.regular_files import MAX_SMALL_BYTES, read_given
from ktconv.system.units import counted, listed

KIND, SCHEMA = "kept experts", 1
RECORD = "pruned"  # key in the manifest's entry about the source
WRITE = "ktconv prune MODEL --scores SCORES --keep N --write FILE"
_FORM = f"give a file that {WRITE} made, or the ktconv.json of a pruned output"
_LARGEST = 1 << 20


class Kept(Struct, frozen=True):
    """A layer of `experts` experts, of which those with these ids stay."""

    experts: int
    ids: tuple[int, ...]  # ascending

    @property
    def dropped(self) -> list[int]:
        """Ids of the experts that go."""
        return sorted(set(range(self.experts)) - set(self.ids))


class Pruning(Struct, frozen=True, dict=True):
    """The experts that stay, by layer, and layers that are left out."""

    layers: Mapping[int, Kept]
    left_out: tuple[int, ...] = ()

    def record(self) -> dict[str, Any]:
        """The record for manifests, which `pruning_of_record` reads."""
        layers = {
            str(layer): {"experts": one.experts, "kept": list(one.ids)}
            for layer, one in sorted(self.layers.items())
        }
        return {"layers": layers, **({"left_out": list(self.left_out)} if self.left_out else {})}

    def document(self) -> dict[str, Any]:
        """The content of a file."""
        return {"kind": KIND, "schema": SCHEMA, **self.record()}

    @cached_property
    def data(self) -> bytes:
        """The bytes that identify it."""
        return json.dumps(self.record(), sort_keys=True).encode()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def in_words(self) -> str:
        """ "12 of 16 experts (layers 0-3)", for each number that layers have."""
        layers: dict[tuple[int, int], list[int]] = {}
        for layer, one in sorted(self.layers.items()):
            layers.setdefault((len(one.ids), one.experts), []).append(layer)
        return ", ".join(
            f"{kept} of {counted(experts, 'expert')} ({listed('layer', indices)})"
            for (kept, experts), indices in layers.items()
        )


def read_pruning(path: Path) -> Pruning:
    """FILE of --prune. UsageError, which names what is wrong, for any other file."""
    data = read_given(path, "--prune", _FORM, MAX_SMALL_BYTES)
    try:
        content = parse_object(data, str(path), _FORM)
    except CheckpointError as error:
        raise UsageError(str(error), _FORM) from None
    if content.get("kind") == KIND:
        if content.get("schema") != SCHEMA:
            raise UsageError(
                f"{path} has schema {content.get('schema')!r:.20}, not {SCHEMA}", _FORM
            )
        return pruning_of_record(content, str(path))
    source = content.get("source")
    if not isinstance(source, dict) or RECORD not in source:
        raise UsageError(f"{path} does not say which experts are kept", _FORM)
    return pruning_of_record(source[RECORD], str(path))


def pruning_of_record(record: object, where: str) -> Pruning:
    """The inverse of `Pruning.record`. UsageError, with `where` in its sentence, for anything
    else."""
    layers = record.get("layers") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(layers, dict) or not layers:
        raise UsageError(f"{where} names no layers of kept experts", _FORM)
    left_out = record.get("left_out", [])
    if not isinstance(left_out, list) or any(type(one) is not int for one in left_out):
        raise UsageError(f"{where}: left_out is not a list of layers", _FORM)
    found = {_number(key, where): _kept(key, one, where) for key, one in layers.items()}
    return Pruning(dict(sorted(found.items())), tuple(sorted(set(left_out))))


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and str(int(text)) == text):
        raise UsageError(f"{where}: layer {text!r:.20} is not a number", _FORM)
    return int(text)


def _kept(layer: str, one: object, where: str) -> Kept:
    experts = one.get("experts") if isinstance(one, dict) else None
    ids = one.get("kept") if isinstance(one, dict) else None
    if type(experts) is not int or not 0 < experts <= _LARGEST or not isinstance(ids, list):
        raise UsageError(
            f"{where}: layer {layer} does not say how many experts it has, and which are kept",
            _FORM,
        )
    if not ids:
        raise UsageError(f"{where}: no expert of layer {layer} is kept", _FORM)
    seen: set[int] = set()
    for number in ids:
        if type(number) is not int or not 0 <= number < experts:
            raise UsageError(
                f"{where}: {number!r:.20} is not an expert of layer {layer}, which has {experts}",
                _FORM,
            )
        if number in seen:
            raise UsageError(f"{where}: expert {number} of layer {layer} is named twice", _FORM)
        seen.add(number)
    return Kept(experts, tuple(sorted(ids)))


def recorded_pruning(run: object, where: str) -> Pruning | None:
    """The pruning in the record of a conversion; None without one."""
    source = run.get("source") if isinstance(run, dict) else None
    if not isinstance(source, dict) or RECORD not in source:
        return None
    return pruning_of_record(source[RECORD], where)
