"""Experts of a converted model, mapped from its shards without a copy."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import read_header
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import TensorId, parse_tensor_name, tensor_name
from ktconv.moe.experts import Experts, Matrices
from ktconv.moe.methods import METHODS, Method
from ktconv.native import Activation, Projection

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
    """Layers whose packed experts lie in the shards of `directory`."""
    return sorted({tensor.layer for tensor in _map_layer(directory, None)})


def open_experts(directory: Path, layer: int | None = None) -> Experts:
    """One layer's experts (the first that has some, if not told), from safetensors shards.

    Method, sizes and number of parts follow from the tensors' sizes. Raises CheckpointError if
    tensors are missing or contradict each other, UsageError if there is no such layer.
    """
    layers = moe_layers(directory)
    if not layers:
        raise CheckpointError(
            f"{directory} holds no packed experts", "give an OUTPUT of ktconv quantize-cpu"
        )
    wanted = layers[0] if layer is None else layer
    if wanted not in layers:
        raise UsageError(f"{directory} has no experts of layer {wanted}", f"it has {layers}")
    tensors = _map_layer(directory, wanted)
    return _assemble(directory, wanted, tensors, activation_of(_config(directory)))


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


def _map_layer(directory: Path, layer: int | None) -> dict[TensorId, Array]:
    """Views of the packed tensors, uint8; of all layers if not told which."""
    found: dict[TensorId, Array] = {}
    for path in sorted(directory.glob("*.safetensors")):
        header = read_header(path)
        names = {
            tensor: ref
            for ref in header.tensors
            if (tensor := parse_tensor_name(ref.name)) is not None
            and (layer is None or tensor.layer == layer)
        }
        if not names:
            continue
        with path.open("rb") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        for tensor, ref in names.items():
            found[tensor] = memory[ref.offset : ref.offset + ref.nbytes]
    return found


def _assemble(
    directory: Path, layer: int, tensors: dict[TensorId, Array], activation: Activation
) -> Experts:
    experts = 1 + max(tensor.expert for tensor in tensors)
    parts = 1 + max(tensor.part for tensor in tensors)

    def get(proj: Any, expert: int, part: int, kind: Any) -> Array:
        memory = tensors.get(TensorId(layer, proj, expert, part, kind))
        if memory is None:
            name = tensor_name(layer, proj, expert, part, kind)
            raise CheckpointError(f"{directory} lacks {name}", "convert it again")
        return memory

    width = get("gate", 0, 0, "scale").nbytes // 4
    hidden = get("down", 0, 0, "scale").nbytes // 4
    method = _method_of(directory, get("gate", 0, 0, "weight").nbytes, width, hidden)

    def projection(proj: Any, expert: int, part: int) -> Projection:
        scale = get(proj, expert, part, "scale")
        if scale.nbytes != 4 * (hidden if proj == "down" else width):
            name = tensor_name(layer, proj, expert, part, "scale")
            raise CheckpointError(f"{name} of {directory} has {scale.nbytes} bytes")
        aligned = scale if scale.ctypes.data % 4 == 0 else scale.copy()
        return Projection(get(proj, expert, part, "weight"), aligned)

    rows: list[list[tuple[Projection, Projection, Projection] | None]] = [
        [
            (projection("gate", e, p), projection("up", e, p), projection("down", e, p))
            for e in range(experts)
        ]
        for p in range(parts)
    ]
    try:
        made = native.Layer(method.layout, activation, hidden, width * parts, rows)
    except ValueError as error:
        raise CheckpointError(
            f"layer {layer} of {directory}: {error}", "convert it again"
        ) from None
    return Experts(
        method, made, activation, range(experts), lambda e: _values(method, rows, e, width, hidden)
    )


def _method_of(directory: Path, nbytes: int, rows: int, cols: int) -> Method:
    for name in ("int4", "int8"):
        if METHODS[name].layout.weight_size(rows, cols) == nbytes:
            return METHODS[name]
    raise CheckpointError(f"{directory} holds weights of a format that the kernels do not know")


def _values(method: Method, rows: list[Any], expert: int, width: int, hidden: int) -> Matrices:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    step = np.float32(16 if method.name == "int4" else 1)
    parts = []
    for row in rows:
        matrices = []
        for matrix, shape in zip(row[expert], shapes, strict=True):
            codes = native.unpack(method.name, np.ascontiguousarray(matrix.codes), *shape)
            matrices.append(codes * (matrix.scale.view(np.float32) * step)[:, None])
        parts.append(matrices)
    gates, ups, downs = zip(*parts, strict=True)
    return np.concatenate(gates), np.concatenate(ups), np.concatenate(downs, axis=1)
