"""Finds the weights of experts by the names of a checkpoint's tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ktconv.families import table
from ktconv.source import Checkpoint, MoELayer, Projection, TensorRef
from ktconv.source.reading.reader import SourceReader
from ktconv.source.shards import read_shards, select_shards
from ktconv.system.collector import collector_paused
from ktconv.verify.second_reader.adapters import Adapted, Pair, SecondAdapter
from ktconv.verify.second_reader.encodings import (
    PRIMARY,
    SCALES,
    Place,
    Source,
    Weight,
    primary_of,
    transposed,
    weight_of,
)
from ktconv.verify.second_reader.naming_map import MappedNames
from ktconv.verify.second_reader.numbers import ITEMS, floats_of
from ktconv.verify.second_reader.pruned import KeptNames, Origin

Parts = dict[str, TensorRef]


class UnknownWeightError(Exception):
    """Tensors that no row of the second reader fits; the text names the weight."""


class SecondReader:
    """Weights of a checkpoint: by layer, expert and projection, or by their primary tensor."""

    def __init__(self, checkpoint: Checkpoint, reader: SourceReader) -> None:
        self._checkpoint, self._reader = checkpoint, reader
        self._quantization = _quantization(checkpoint.config.content)
        self._lock = threading.Lock()
        self._by_module: Mapping[str, Parts] | None = None
        mapped = checkpoint.mapped
        kind = str(checkpoint.config.content.get("model_type"))
        self._adapters = [SecondAdapter(one, kind) for one in checkpoint.adapters]
        self._map = None if mapped is None else MappedNames(mapped.naming.content)

    def expert(self, layer: MoELayer, expert: int, proj: Projection) -> Weight | Adapted:
        """The weight with what adapters add to it; raises as `_expert`. Of a model with fewer
        experts, `expert` is the new number."""
        if self._checkpoint.unpruned is not None:
            whole = {one.index: one for one in self._checkpoint.unpruned.layers}
            layer = whole[layer.index]
            expert = self._kept.old_number(layer, expert)
        return _adapted(
            self._expert(layer, expert, proj),
            [pair for one in self._adapters for pair in one.of_expert(layer, expert, proj)],
        )

    def _expert(self, layer: MoELayer, expert: int, proj: Projection) -> Weight:
        """Raises UnknownWeightError where the tensors are no weight of the layer's dimensions."""
        rows, cols = layer.intermediate_size, layer.hidden_size
        if proj == "down":
            rows, cols = cols, rows
        given = self._map.of_source(layer.source) if self._map else {}
        turned, number = given.get("stored") == "in-out", expert + layer.first_expert
        for spelt in table.FAMILIES.matrices:
            word = spelt.of(proj)
            for name in (f"{layer.source}.{number}.{word}", f"{layer.source}.{word}.{number}"):
                parts = self._modules().get(name) if word else None
                if parts:
                    return self._weight(name, parts, _whole(parts, rows, cols, turned))
        for word in table.FAMILIES.fused:  # gate and up of one expert, or of all
            names = (f"{layer.source}.{number}.{word}", f"{layer.source}.{word}.{number}")
            pair = next(filter(None, map(self._modules().get, names)), None)
            if pair and proj != "down":
                order = given.get("order") or self._order(word, pair)
                place = _half(pair, rows, cols, proj, order, turned)
                return self._weight(f"{layer.source}.{expert}.{word}", pair, place)
        for names_of in sorted(table.FAMILIES.stacked, key=lambda one: -len({*one.values()})):
            # In an order of its own: more tensors first, because of two ways one may have the
            # names of the other.
            way = {what: names_of[what] for what in layer.projections if what in names_of}
            stacks = {what: self._fused(layer.source, word) for what, word in way.items()}
            if proj in way and all(stacks.values()):
                if way[proj] in table.FAMILIES.rows_of_all:
                    stacks, place = _rows_of_all(layer, expert, proj, stacks)
                else:
                    order = None
                    if way.get("gate") == way["up"]:
                        order = given.get("order") or self._order(way["up"], stacks["up"])
                    place = _stacked(layer, expert, proj, stacks, order, given.get("stored"))
                return self._weight(f"{layer.source}.{way[proj]}", stacks[proj], place)
        raise UnknownWeightError(f"{layer.source}: expert {expert} has no {proj} projection")

    # ---- models with fewer experts ----

    @cached_property
    def _kept(self) -> KeptNames:
        checkpoint = self._checkpoint
        assert checkpoint.pruning is not None and checkpoint.unpruned is not None
        every = (tensor for parts in self._modules().values() for tensor in parts.values())
        tensors = {tensor.name: tensor for tensor in every}
        return KeptNames(checkpoint.pruning.record(), checkpoint.unpruned.layers, tensors)

    def kept_origin(self, name: str, shape: Sequence[int]) -> Origin | None:
        """See `KeptNames.origin`."""
        return self._kept.origin(name, shape)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole model's other tensors, where the source is pruned."""
        whole = self._checkpoint.unpruned
        return {one.name: one.shape for one in whole.other_tensors} if whole else {}

    def is_cut(self, tensor: TensorRef) -> bool:
        """Whether a tensor is one of the source without the rows of some experts."""
        return self._shapes.get(tensor.name, tensor.shape) != tensor.shape

    def module(self, tensor: str, rows: int, cols: int) -> Weight | Adapted:
        """`_module` with what adapters add to it."""
        pairs = [pair for one in self._adapters for pair in one.of_module(tensor)]
        return _adapted(self._module(tensor, rows, cols), pairs)

    def scale_of(self, tensor: str) -> str | None:
        """The tensor of the scales of the FP8 weight `tensor`, or itself if it is one."""
        module, _, part = tensor.rpartition(".")
        found = next((one for one in SCALES if one in self._modules().get(module, {})), None)
        return f"{module}.{found}" if part in ("weight", found) and found else None

    def new_scales(self, tensor: str) -> tuple[NDArray[np.float64], int]:
        """Numbers of a tensor of scales as the converter reads it, with adapters, and the bytes of
        one."""
        found = next(one for one in self._checkpoint.other_tensors if one.name == tensor)
        values = floats_of(self._read(found, 0, found.nbytes), found.dtype)
        return values.astype(np.float64), np.dtype(ITEMS[found.dtype]).itemsize

    @property
    def scales_are_powers(self) -> bool:
        """Whether config.json says that FP8 scales are powers of two, in whatever dtype."""
        return self._quantization.get("scale_fmt") == "ue8m0"

    def _module(self, tensor: str, rows: int, cols: int) -> Weight:
        """The weight [rows, cols] whose primary tensor is `tensor`, of a module that is no
        expert; a vector is a row."""
        name, _, part = tensor.rpartition(".")
        parts = self._modules().get(name, {}) if part in PRIMARY else self._fused(name, part)
        row = {key: replace(one, shape=(1, *one.shape)) for key, one in parts.items()
               if one.name == tensor and len(one.shape) == 1}  # fmt: skip
        parts = {**parts, **row}
        return self._weight(tensor, parts, _whole(parts, rows, cols))

    def _weight(self, name: str, parts: Parts, place: Place | None) -> Weight:
        source = place and Source(parts, place, self._quantization, self._read)
        weight = weight_of(source) if source else None
        if weight is None:
            shapes = ", ".join(f"{p} {t.dtype} {list(t.shape)}" for p, t in sorted(parts.items()))
            raise UnknownWeightError(f"{name} is no weight that verify knows: {shapes}")
        return weight

    def _read(self, tensor: TensorRef, start: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        with self._reader.open(tensor.file) as fd:
            self._reader.read(fd, tensor, memoryview(data), start)
        return bytes(data)

    def _modules(self) -> Mapping[str, Parts]:
        """Tensors by all of their names up to the last dot, and by what follows it. From headers
        that are read again: what the converter left aside is there too."""
        with self._lock, collector_paused():
            if self._by_module is None:
                found: dict[str, Parts] = {}
                for header in read_shards(select_shards(self._checkpoint.path)).headers:
                    for tensor in header.tensors:
                        usual = self._map and self._map.usual(tensor.name)
                        module, _, part = (usual or tensor.name).rpartition(".")
                        found.setdefault(module, {})[part] = tensor
                self._by_module = found
            return self._by_module

    def _fused(self, source: str, word: str) -> Parts:
        """The tensors of a parameter with all experts of a layer: gate_up_proj,
        gate_up_proj_scale_inv, gate_up_proj_blocks, or gate_up_proj.weight and so on."""
        whole = f"{source}.{word}"
        module, _, last = whole.rpartition(".")
        found = dict(self._modules().get(whole, {}))
        found |= self._modules().get(f"{whole}.weight", {})  # .scale
        for name, tensor in self._modules().get(module, {}).items():
            if name in (last, f"{last}_weight"):
                found["weight"] = tensor
            elif name.startswith(f"{last}_"):
                found[f"weight{name.removeprefix(last).removeprefix('_weight')}"] = tensor
        return found

    def _order(self, word: str, gate_up: Parts) -> str:
        """Order of gate and up in what is called `word`: in turns in gpt-oss, whose blocks no other
        model has, and where a family's row says so of its own name."""
        if "weight_blocks" in gate_up:
            return "interleaved"
        if any(tensor.file.suffix == ".gguf" for tensor in gate_up.values()):
            return "gate first"
        config = self._checkpoint.config.content
        sections = [config, *(one for one in config.values() if isinstance(one, dict))]
        rows = (table.FAMILIES.of(section.get("model_type")) for section in sections)
        spelt = (row for row in rows if row is not None and word in row.gate_up)
        return "interleaved" if any(row.interleaved for row in spelt) else "gate first"


def _adapted(weight: Weight, pairs: Sequence[Pair]) -> Weight | Adapted:
    return Adapted(weight, pairs) if pairs else weight


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config of the text model, which may be in a section."""
    sections = [one for one in config.values() if isinstance(one, dict)]
    for section in (*sections, config):
        found = section.get("quantization_config")
        if isinstance(found, dict):
            return {**found, "data_type": _data_type(found)}
    return {}


def _data_type(quantization: Mapping[str, Any]) -> str:
    """Data type of AutoRound, for all modules or those that differ: the first of an MX format."""
    extra = quantization.get("extra_config")
    modules = extra.values() if isinstance(extra, dict) else ()
    found = [str(one.get("data_type")) for one in (quantization, *modules) if isinstance(one, dict)]
    return next((one for one in found if one.startswith("mx_")), "")


def _shape(parts: Parts) -> tuple[int, ...]:
    primary = primary_of(parts)
    return parts[primary].shape if primary else ()


def _whole(parts: Parts, rows: int, cols: int, turned: bool = False) -> Place | None:
    """The place of a weight that has tensors of its own. `turned`: a map says [in, out]."""
    shape = _shape(parts)
    if turned and len(shape) == 2 and shape[1] == rows:
        return Place(rows, cols, rows, cols, transposed=True)
    if len(shape) != 2 or (shape[0] != rows and not transposed(parts)):
        return None
    return Place(rows, cols, rows, cols, transposed=transposed(parts))


def _half(
    parts: Parts, rows: int, cols: int, proj: Projection, order: str, turned: bool
) -> Place | None:
    """The place of gate or up in one expert's tensor of both, stored [2I, H]."""
    both = _whole(parts, 2 * rows, cols, turned)
    if both is None:
        return None
    first, step = _rows_of_half(proj, order, rows)
    return replace(both, rows=rows, first=first, step=step)


def _rows_of_half(proj: Projection, order: str, inner: int) -> tuple[int, int]:
    """The first row of gate or up where they are together, and the distance of its rows."""
    if order == "interleaved":
        return (1, 2) if proj == "up" else (0, 2)
    behind = proj == ("gate" if order == "up first" else "up")
    return (inner if behind else 0), 1


def _rows_of_all(
    layer: MoELayer, expert: int, proj: Projection, stacks: dict[Projection, Parts]
) -> tuple[dict[Projection, Parts], Place | None]:
    """Tensors [E * I, H] as [E, I, H], and the place of a projection in them: of down turned."""
    hidden, inner, experts = layer.hidden_size, layer.intermediate_size, len(layer.experts)
    if any(_shape(parts) != (experts * inner, hidden) for parts in stacks.values()):
        return stacks, None
    rows, cols = (hidden, inner) if proj == "down" else (inner, hidden)
    split = {
        what: {part: replace(one, shape=(experts, inner, hidden)) for part, one in parts.items()}
        for what, parts in stacks.items()
    }
    place = Place(rows, cols, rows, cols, 0, 1, experts, expert, transposed=proj == "down")
    return split, place


def _stacked(
    layer: MoELayer,
    expert: int,
    proj: Projection,
    stacks: Mapping[Projection, Parts],
    order: str | None,
    stored: str | None,
) -> Place | None:
    """The place of a projection in tensors with all experts: up and often gate [E, I, H] each, or
    together [E, 2I, H], and down [E, H, I]; or all with the last two axes swapped. Of packed
    numbers only the first of the two axes is known to count outputs. `order` of gate and up: where
    they are together."""
    hidden, inner, experts = layer.hidden_size, layer.intermediate_size, len(layer.experts)
    shapes = {what: _shape(parts) for what, parts in stacks.items()}
    if any(len(shape) < 3 for shape in shapes.values()) or shapes["down"][0] != experts:
        return None
    # Only where gate and up are together there may be more of them, which have no down.
    every = shapes["up"][0]
    if every < experts or (order is None and any(one[0] != experts for one in shapes.values())):
        return None
    down, wide = shapes["down"], [shape for what, shape in shapes.items() if what != "down"]
    outs = inner if order is None else 2 * inner
    straight = all(shape[1] == outs for shape in wide) and down[1] == hidden
    turned = all(shape[2] == outs for shape in wide) and down[2] == hidden
    if stored is None:
        turned = turned and (order is not None or not straight)  # apart, squares are [out, in]
    else:
        straight, turned = straight and stored == "out-in", turned and stored == "in-out"
    if straight == turned:
        return None
    if proj == "down":
        return Place(hidden, inner, hidden, inner, 0, 1, experts, expert, turned)
    first, step = (0, 1) if order is None else _rows_of_half(proj, order, inner)
    return Place(inner, hidden, outs, hidden, first, step, every, expert, turned)
