"""From the names of a checkpoint's tensors to the weights of experts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktconv.checkpoint import Checkpoint, MoELayer, Projection, TensorRef
from ktconv.checkpoint.shards import read_shards, select_shards
from ktconv.families import table
from ktconv.reading.reader import SourceReader
from ktconv.verify.second_reader.encodings import Place, Source, Weight, transposed, weight_of

Parts = dict[str, TensorRef]
PRIMARY = ("weight", "weight_packed", "qweight")


class UnknownWeightError(Exception):
    """Tensors that no row of the second reader fits; the text names the weight."""


class SecondReader:
    """Weights of a checkpoint: by layer, expert and projection, or by their primary tensor."""

    def __init__(self, checkpoint: Checkpoint, reader: SourceReader) -> None:
        self._checkpoint, self._reader = checkpoint, reader
        self._quantization = _quantization(checkpoint.config)
        self._lock = threading.Lock()
        self._by_module: Mapping[str, Parts] | None = None

    def expert(self, layer: MoELayer, expert: int, proj: Projection) -> Weight:
        """Raises UnknownWeightError where the tensors are no weight of the layer's dimensions."""
        rows, cols = layer.intermediate_size, layer.hidden_size
        if proj == "down":
            rows, cols = cols, rows
        for spelt in table.FAMILIES.matrices:
            name = f"{layer.source}.{expert}.{spelt.of(proj)}"
            parts = self._modules().get(name)
            if parts:
                return self._weight(name, parts, _whole(parts, rows, cols))
        for gate_up, down in table.FAMILIES.fused.items():
            name = f"{layer.source}.{down if proj == 'down' else gate_up}"
            parts, other = self._fused(layer.source, gate_up), self._fused(layer.source, down)
            if parts and other:
                place = _stacked(layer, expert, proj, _shape(parts), _shape(other))
                return self._weight(name, other if proj == "down" else parts, place)
        raise UnknownWeightError(f"{layer.source}: expert {expert} has no {proj} projection")

    def module(self, tensor: str, rows: int, cols: int) -> Weight:
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
        with self._lock:
            if self._by_module is None:
                found: dict[str, Parts] = {}
                for header in read_shards(select_shards(self._checkpoint.path)):
                    for tensor in header.tensors:
                        module, _, part = tensor.name.rpartition(".")
                        found.setdefault(module, {})[part] = tensor
                self._by_module = found
            return self._by_module

    def _fused(self, source: str, word: str) -> Parts:
        """The tensors of a parameter with all experts of a layer: gate_up_proj,
        gate_up_proj_scale_inv, or gate_up_proj.weight and so on."""
        found = dict(self._modules().get(f"{source}.{word}", {}))
        for name, tensor in self._modules().get(source, {}).items():
            if name == word:
                found["weight"] = tensor
            elif name.startswith(f"{word}_"):
                found[f"weight{name.removeprefix(word)}"] = tensor
        return found


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config of the text model, which may be in a section."""
    sections = [one for one in config.values() if isinstance(one, dict)]
    for section in (*sections, config):
        found = section.get("quantization_config")
        if isinstance(found, dict):
            return found
    return {}


def _shape(parts: Parts) -> tuple[int, ...]:
    primary = next((name for name in PRIMARY if name in parts), None)
    return parts[primary].shape if primary else ()


def _whole(parts: Parts, rows: int, cols: int) -> Place | None:
    """The place of a weight that has tensors of its own."""
    shape = _shape(parts)
    if len(shape) != 2 or (shape[0] != rows and not transposed(parts)):
        return None
    return Place(rows, cols, rows, cols, transposed=transposed(parts))


def _stacked(
    layer: MoELayer, expert: int, proj: Projection, gate_up: tuple[int, ...], down: tuple[int, ...]
) -> Place | None:
    """The place of a projection in tensors with all experts: gate_up [E, 2I, H] and
    down [E, H, I], or both with the last two axes swapped."""
    hidden, inner, experts = layer.hidden_size, layer.intermediate_size, len(layer.experts)
    if len(gate_up) != 3 or len(down) != 3 or gate_up[0] != experts or down[0] != experts:
        return None
    straight = gate_up[1] == 2 * inner and down[1] == hidden
    turned = gate_up[2] == 2 * inner and down[2] == hidden
    if straight == turned:
        return None
    if proj == "down":
        return Place(hidden, inner, hidden, inner, 0, 1, experts, expert, turned)
    first = inner if proj == "up" else 0
    return Place(inner, hidden, 2 * inner, hidden, first, 1, experts, expert, turned)
