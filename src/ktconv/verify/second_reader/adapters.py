"""Reads LoRA adapters a second time, and adds them to weights: W + s B A in float64.

Names are looked up from those of the weights, where the converter looks up weights from the names
of an adapter's tensors.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ktconv.families import table
from ktconv.source import MoELayer, Projection, TensorRef
from ktconv.source.safetensors_file import read_header
from ktconv.system.arrays import F32
from ktconv.system.patterns import Patterns
from ktconv.verify.second_reader.encodings import Weight
from ktconv.verify.second_reader.numbers import floats_of

F64 = NDArray[np.float64]

_FILES = ("adapter_model.safetensors", "fused_expert_lora.safetensors")
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_A|lora_B)\.weight")
_EMBEDDING = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_embedding_(A|B)")
_WITHIN = ("fc1", "fc2", "input_linear", "output_linear")  # modules of one parameter each
_ROUNDED = 2.0**-20  # of the sum of all products' magnitudes, and of float32's own rounding


class Pair(Struct, frozen=True):
    """B [outputs, rank] and A [rank, inputs], and their factor."""

    b: F64
    a: F64
    scale: float


class Adapted(Struct, frozen=True):
    """A weight of the source with what adapters add to it, in the interface of `Weight`."""

    weight: Weight
    pairs: Sequence[Pair]
    scale = zero = row_of = col_of = middle = None  # sums are numbers without scales

    def values(self, rows: range, cols: range) -> F32:
        found = self.weight.values(rows, cols).astype(np.float64)
        for one in self.pairs:
            found += one.scale * (one.b[rows.start : rows.stop] @ one.a[:, cols.start : cols.stop])
        return found.astype(np.float32)

    def slack(self, rows: range, cols: range) -> F64:
        """Bounds of how far other orders of the same sums are from `values`."""
        found = np.abs(self.weight.values(rows, cols).astype(np.float64))
        for one in self.pairs:
            b = np.abs(one.b[rows.start : rows.stop]).max(axis=1, keepdims=True)
            a = np.abs(one.a[:, cols.start : cols.stop]).max(axis=0, keepdims=True)
            largest = len(one.a) * (b * a)
            found += abs(one.scale) * largest
        return found * _ROUNDED


class SecondAdapter:
    """An adapter of `Checkpoint.adapters`: DIR:WEIGHT."""

    def __init__(self, text: str, model_type: str) -> None:
        directory, _, weight = text.rpartition(":")
        self._directory, self._weight = Path(directory), float(weight)
        self._model_type = model_type
        config = self._directory / "adapter_config.json"
        self._config: dict[str, Any] = json.loads(config.read_text()) if config.exists() else {}
        self._patterns: dict[str, Patterns] = {}
        self._lock = threading.Lock()
        self._by_layer: dict[int, list[str]] = {}  # modules
        self._kept: dict[str, F64] = {}
        self._tensors: dict[str, TensorRef] = {}
        self._pairs: dict[str, dict[str, TensorRef]] = {}  # by module
        self._tails: dict[str, list[str]] = {}  # modules by what follows `layers.`
        for name in _FILES:
            if (self._directory / name).exists():
                for tensor in read_header(self._directory / name).tensors:
                    self._enter(tensor)

    def _enter(self, tensor: TensorRef) -> None:
        self._tensors[tensor.name] = tensor
        plain, embedding = _NAME.fullmatch(tensor.name), _EMBEDDING.fullmatch(tensor.name)
        if found := plain or embedding:
            module = found[1]
            if module not in self._pairs:
                self._tails.setdefault(_tail(module), []).append(module)
                if number := re.search(r"\.([0-9]+)\.", f".{module}."):
                    self._by_layer.setdefault(int(number[1]), []).append(module)
            self._pairs.setdefault(module, {})[found[2].removeprefix("lora_")] = tensor

    # ---- experts

    def of_expert(self, layer: MoELayer, expert: int, proj: Projection) -> Iterator[Pair]:
        """Pairs that are added to a matrix of an expert."""
        index, number = layer.index, expert + layer.first_expert
        rows, cols = layer.intermediate_size, layer.hidden_size
        rows, cols = (cols, rows) if proj == "down" else (rows, cols)
        fused = [self._tensors.get(f"layers.{index}.experts.{proj}_lora_{side}") for side in "ab"]
        if fused[0] is not None and fused[1] is not None:
            rank = fused[0].shape[1]
            a, b = (self._whole(one)[expert] for one in fused if one is not None)
            yield self._pair(b, a, f"{layer.source}.0.{proj}_proj", rank)
            return
        for module in self._by_layer.get(index, ()):
            head, _, word = module.rpartition(".")
            named = table.FAMILIES.projections.get(word) == proj
            if named and head.endswith(f".{number}") and "experts" in head:
                pair = self._pairs[module]
                a, b = (self._read(pair[side]) for side in "AB")
                yield self._pair(b, a, module, len(a))
        yield from self._of_parameters(layer, expert, proj, (rows, cols))

    def _of_parameters(
        self, layer: MoELayer, expert: int, proj: Projection, shape: tuple[int, int]
    ) -> Iterator[Pair]:
        """Pairs of target_parameters: which one they are of follows from their shapes, or
        from the order in which they are nested."""
        found = [one for one in self._by_layer.get(layer.index, ()) if _is_of_all(one, layer)]
        if not found:
            return
        wide = len(layer.projections) - 1
        hidden, inner = layer.hidden_size, layer.intermediate_size
        first, last = {hidden, wide * inner}, {hidden, inner}
        for module in found:
            pair = self._pairs[module]
            a, b = (self._whole(pair[side]) for side in "AB")
            sizes = {a.shape[1], b.shape[0]}
            depth = module.split(".").count("base_layer")
            nested = len({one.replace(".base_layer", "") for one in found}) < len(found)
            is_down = sizes == last
            if first == last:
                is_down = depth == 0 if nested else self._says_down(module)
            if is_down != (proj == "down"):
                continue
            entries = self._entries(layer, a, module, is_down)
            rank = len(a) // entries
            own_a = a[expert * rank : (expert + 1) * rank]
            own_b = b[:, expert::entries]
            if self._config.get("lora_B_layout") == "grouped_by_expert":
                own_b = b[:, expert * rank : (expert + 1) * rank]
            outputs = shape[0] * (1 if is_down else wide)
            straight = (own_a.shape[1], len(own_b)) == (shape[1], outputs)
            if straight and own_a.shape[1] == len(own_b) and layer.experts:
                straight = not self._swapped(layer, found)
            if not straight:
                own_a, own_b = own_b.T, own_a.T
            if not is_down and wide > 1:
                own_b = self._half(layer, own_b, proj)
            name = module.replace(".base_layer", "")
            parameter = "down_proj" if is_down else "gate_up_proj" if wide > 1 else "up_proj"
            if name.rpartition(".")[2] in _WITHIN:
                parameter = "weight"
            yield self._pair(own_b, own_a, f"{name}.{parameter}", rank)

    def _swapped(self, layer: MoELayer, modules: Sequence[str]) -> bool:
        """Whether another parameter of the layer shows that A and B have changed places."""
        hidden, inner = layer.hidden_size, layer.intermediate_size
        wide = (len(layer.projections) - 1) * inner
        for module in modules:
            pair = self._pairs[module]
            sizes = pair["A"].shape[1], pair["B"].shape[0]
            if sizes in ((wide, hidden), (hidden, inner)) and sizes[0] != sizes[1]:
                return sizes not in ((hidden, wide), (inner, hidden))
        return False

    def _says_down(self, module: str) -> bool:
        if module.endswith(("fc2", "output_linear")):
            return True
        targets = [str(one) for one in self._config.get("target_parameters") or ()]
        return any(one.endswith("down_proj") for one in targets)

    def _entries(self, layer: MoELayer, a: F64, module: str, is_down: bool) -> int:
        """Experts that a parameter has matrices for: by the rank that the config says."""
        count = len(layer.experts)
        name = module.replace(".base_layer", "") + (".down_proj" if is_down else ".gate_up_proj")
        rank = self._stated("r", "rank_pattern", name)
        stated = rank is not None and len(a) % rank == 0 and len(a) // rank >= count
        return int(len(a) // rank) if rank and stated else count

    def _half(self, layer: MoELayer, b: F64, proj: Projection) -> F64:
        word = "gate_up_proj"
        rows = (row for row in table.FAMILIES.rows if word in row.gate_up and row.interleaved)
        kinds = {kind for row in rows for kind in row.types}
        if self._model_type in kinds:
            return b[proj == "up" :: 2]
        return b[: len(b) // 2] if proj == "gate" else b[len(b) // 2 :]

    # ---- other modules

    def of_module(self, tensor: str) -> Iterator[Pair]:
        """Pairs that are added to the weight that is this tensor."""
        module = tensor.removesuffix(".weight")
        names = [module] if module in self._pairs else self._tails.get(_tail(module), [])
        for name in names:
            pair = self._pairs[name]
            a, b = (self._read(pair[side]) for side in "AB")
            if pair["A"].name.endswith("lora_embedding_A"):
                yield self._pair(a.T, b.T, name, len(a))
            else:
                yield self._pair(b, a, name, len(a))

    # ---- numbers

    def _pair(self, b: F64, a: F64, module: str, rank: int) -> Pair:
        alpha = self._stated("lora_alpha", "alpha_pattern", module)
        by = np.sqrt(rank) if self._config.get("use_rslora") else rank
        return Pair(b, a, self._weight * (alpha or 0.0) / by)

    def _stated(self, setting: str, patterns: str, module: str) -> float | None:
        own = self._config.get(patterns) or {}
        with self._lock:
            if patterns not in self._patterns:
                self._patterns[patterns] = Patterns(own)
            found = self._patterns[patterns].first(module)
        value = self._config.get(setting) if found is None else own[found]
        return None if value is None else float(value)

    def _read(self, tensor: TensorRef) -> F64:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            found = floats_of(file.read(tensor.nbytes), tensor.dtype)
        return found.astype(np.float64).reshape(tensor.shape)

    def _whole(self, tensor: TensorRef) -> F64:
        """A tensor of all experts; those of a layer stay in memory."""
        with self._lock:
            if tensor.name not in self._kept:
                if len(self._kept) >= 8:
                    del self._kept[next(iter(self._kept))]
                self._kept[tensor.name] = self._read(tensor)
            return self._kept[tensor.name]


def _is_of_all(module: str, layer: MoELayer) -> bool:
    """Whether a module has the matrices of all experts of a layer."""
    name = module.replace(".base_layer", "")
    parent, _, word = name.rpartition(".")
    if word in _WITHIN:
        name, word = parent, parent.rpartition(".")[2]
        if _tail(name) == _tail(layer.source):
            return True
    return word in table.FAMILIES.containers


def _tail(module: str) -> str:
    """The part that a module's names in a checkpoint and in transformers share."""
    blocks = table.FAMILIES.names("block")
    found = re.search(r"\.([0-9]+\..*)", f".{module}")
    if found is None:
        return module.rpartition(".")[2]
    return ".".join("mlp" if word in blocks else word for word in found[1].split("."))
