"""Experts of a converted model, mapped from its shards without a copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import KINDS, PROJECTIONS, TensorId
from ktconv.moe.experts import Experts, Matrices
from ktconv.moe.methods import METHODS, Method
from ktconv.native import Activation, Projection
from ktconv.packed import PackedWeights, map_file, open_packed

Array = NDArray[Any]

_FUNCTIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def activation_of(config: Mapping[str, Any]) -> Activation:
    """The experts' activation, from a model's config.json."""
    text = config.get("text_config", config)
    limit = text.get("swiglu_limit")
    alpha = text.get("swiglu_alpha", 1.702 if text.get("model_type") == "gpt_oss" else None)
    if alpha is not None:  # gpt-oss and those that took it over
        return Activation("swiglu", float(alpha), 1.0, float(limit or 7.0))
    name = text.get("hidden_act") or text.get("hidden_activation") or "silu"
    if name not in _FUNCTIONS:
        raise CheckpointError(
            f"config.json names the activation {name!r}, which the kernels do not have",
            f"they have: {', '.join(_FUNCTIONS)}",
        )
    return Activation(_FUNCTIONS[name], limit=float(limit) if limit else float("inf"))


def experts_per_token(directory: Path) -> int:
    """The model's top-k; 8 where config.json is missing or does not say."""
    config = _config(directory)
    text = config.get("text_config", config)
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"):
        if isinstance(text.get(name), int) and text[name] > 0:
            return int(text[name])
    return 8


def moe_layers(directory: Path) -> list[int]:
    """Layers whose packed experts lie in `directory`."""
    return list(open_packed(directory).layers)


def open_experts(directory: Path, layer: int | None = None) -> Experts:
    """One layer's experts (the first that has some, if not told), of shards or layer folders.

    Method, sizes and number of parts follow from the tensors' sizes. Raises CheckpointError if
    tensors are missing or contradict each other, UsageError if there is no such layer.
    """
    packed = open_packed(directory)
    layers = list(packed.layers)
    if packed.damaged:
        raise CheckpointError(next(iter(packed.damaged.values())), "convert it again")
    if not layers:
        raise CheckpointError(
            f"{directory} holds no packed experts", "give an OUTPUT of ktconv quantize-cpu"
        )
    wanted = layers[0] if layer is None else layer
    if wanted not in layers:
        raise UsageError(f"{directory} has no experts of layer {wanted}", f"it has {layers}")
    return packed_experts(packed, wanted, activation_of(_config(directory)))


def _config(directory: Path) -> dict[str, Any]:
    """Empty where other tools wrote none: then the activation is SiLU, as nearly always."""
    path = directory / "config.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def packed_experts(packed: PackedWeights, layer: int, activation: Activation) -> Experts:
    """One layer of packed weights that are open already."""
    geometry = packed.geometry(layer)
    assert geometry.format is not None  # what geometry() sees to
    method = METHODS[geometry.format.key]
    shapes = [geometry.shape(proj) for proj in PROJECTIONS]
    mapped = _Mapped(packed)

    def projection(proj: Any, expert: int, part: int) -> Projection:
        weight, scale = (mapped.get(TensorId(layer, proj, expert, part, k)) for k in KINDS)
        return Projection(weight, scale if scale.ctypes.data % 4 == 0 else scale.copy())

    rows: list[list[tuple[Projection, Projection, Projection] | None]] = [
        [
            (projection("gate", e, p), projection("up", e, p), projection("down", e, p))
            for e in range(geometry.experts)
        ]
        for p in range(geometry.parts)
    ]
    try:
        made = native.Layer(method.layout, activation, geometry.hidden, geometry.intermediate, rows)
    except ValueError as error:
        raise CheckpointError(
            f"layer {layer} of {packed.directory}: {error}", "convert it again"
        ) from None
    return Experts(
        method,
        made,
        activation,
        range(geometry.experts),
        lambda e: _values(method, rows, e, shapes),
    )


class _Mapped:
    """Tensors, each file mapped once."""

    def __init__(self, packed: PackedWeights) -> None:
        self._packed = packed
        self._files: dict[Path, Array] = {}

    def get(self, tensor: TensorId) -> Array:
        place = self._packed.place(tensor)
        if place.file not in self._files:
            self._files[place.file] = map_file(place.file)
        return self._files[place.file][place.offset : place.offset + place.nbytes]


def _values(
    method: Method, rows: list[Any], expert: int, shapes: list[tuple[int, int]]
) -> Matrices:
    """What the packed weights stand for, unpacked by a path of its own."""
    step = np.float32(16 if method.name == "int4" else 1)
    parts = []
    for row in rows:
        matrices = []
        for matrix, shape in zip(row[expert], shapes, strict=True):
            codes = native.audit_codes(method.name, np.ascontiguousarray(matrix.codes), *shape)
            matrices.append(codes * (matrix.scale.view(np.float32) * step)[:, None])
        parts.append(matrices)
    gates, ups, downs = zip(*parts, strict=True)
    return np.concatenate(gates), np.concatenate(ups), np.concatenate(downs, axis=1)
