"""Experts of a converted model, mapped from its shards without a copy."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint.config import CONFIG_NAME, TOP_K_KEYS, read_config, text_section
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import KINDS, PROJECTIONS, Format, TensorId, matrix_shape, split
from ktconv.moe.experts import Experts
from ktconv.moe.methods import METHODS
from ktconv.moe.streamed import Piece, Streamed, Streams, piece_rows
from ktconv.native import Activation, Projection
from ktconv.packed.weights import Geometry, PackedWeights, map_pages, name_of, open_packed

Array = NDArray[Any]

_FUNCTIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


_LARGEST = float(np.finfo(np.float32).max)


def activation_of(config: Mapping[str, Any]) -> Activation:
    """The experts' activation, from a model's config.json.

    Raises CheckpointError where config.json has something else in its place.
    """
    text = _text_section(config)
    limit = _positive(text, "swiglu_limit")
    alpha = _positive(text, "swiglu_alpha")
    if alpha is None and "swiglu_alpha" not in text and text.get("model_type") == "gpt_oss":
        alpha = 1.702
    if alpha is not None:  # gpt-oss and those that took it over
        return Activation("swiglu", alpha, 1.0, limit or 7.0)
    name = _name(text, "hidden_act") or _name(text, "hidden_activation") or "silu"
    if name not in _FUNCTIONS:
        raise CheckpointError(
            f"config.json names the activation {name!r}, which the kernels do not have",
            f"they have: {', '.join(_FUNCTIONS)}",
        )
    return Activation(_FUNCTIONS[name], limit=limit or math.inf)


def _text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise _odd("text_config", text, "an object")
    return text_section(config)


def _positive(text: Mapping[str, Any], key: str) -> float | None:
    """A number above 0; None where there is none, or 0."""
    value = text.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _odd(key, value, "a number")
    if not 0 <= value <= _LARGEST:
        raise _odd(key, value, "a positive float32 number")
    return float(value) or None


def _name(text: Mapping[str, Any], key: str) -> str:
    value = text.get(key)
    if not isinstance(value, (str, type(None))):
        raise _odd(key, value, "a name")
    return value or ""


def _odd(key: str, value: object, wanted: str) -> CheckpointError:
    containers: dict[type, str] = {list: "a list", dict: "an object"}
    shown = containers.get(type(value)) or json.dumps(value)
    return CheckpointError(
        f"{CONFIG_NAME} gives {key} as {shown}, which is not {wanted}",
        f"correct {key}, or copy the config.json that belongs to the model",
    )


def experts_per_token(directory: Path) -> int:
    """The model's top-k; 8 where config.json is missing or does not say."""
    return top_k_of(_config(directory))


def top_k_of(config: Mapping[str, Any]) -> int:
    """Experts per token, from a model's config.json; 8 where it does not say."""
    text = _text_section(config)
    for key in TOP_K_KEYS:
        value = text.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _odd(key, value, "a number of experts")
        return value
    return 8


def moe_layers(directory: Path) -> list[int]:
    """Layers whose packed experts lie in `directory`."""
    return list(open_packed(directory).layers)


def open_experts(directory: Path, layer: int | None = None) -> Experts:
    """One layer's experts (the first that has some, if not told), of shards or layer folders.

    Method, sizes and number of parts follow from the tensors' sizes. Raises CheckpointError if
    tensors are missing, contradict each other or have scales that are no numbers, UsageError if
    there is no such layer.
    """
    return open_layer(directory, layer)[1]


def open_layer(directory: Path, layer: int | None = None) -> tuple[int, Experts]:
    """open_experts, with the layer's number."""
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
    experts = packed_experts(packed, wanted, activation_of(_config(directory)))
    _expect_finite_scales(packed, wanted)
    return wanted, experts


def _expect_finite_scales(packed: PackedWeights, layer: int) -> None:
    """One that is not makes its row NaN whenever its expert has a token, and only then."""
    geometry, mapped = packed.geometry(layer), _Mapped(packed)
    for tensor in (
        TensorId(layer, proj, expert, part, "scale")
        for proj in PROJECTIONS
        for expert in geometry.here
        for part in range(geometry.parts)
    ):
        if not np.isfinite(mapped.get(tensor).view(np.float32)).all():
            raise CheckpointError(
                f"{name_of(tensor)} of {packed.directory} holds a scale that is not finite",
                "convert it again",
            )


def _config(directory: Path) -> Mapping[str, Any]:
    """Empty where other tools wrote none: then the activation is SiLU, as nearly always."""
    return read_config(directory).content if (directory / CONFIG_NAME).exists() else {}


def packed_experts(packed: PackedWeights, layer: int, activation: Activation) -> Experts:
    """One layer of packed weights that are open already. Experts that were left out of it have
    no origin."""
    geometry = packed.geometry(layer)
    assert geometry.format is not None  # what geometry() sees to
    method = METHODS[geometry.format.key]
    mapped = _Mapped(packed)

    def projection(proj: Any, expert: int, part: int) -> Projection:
        weight, scale = (mapped.get(TensorId(layer, proj, expert, part, k)) for k in KINDS)
        return Projection(weight, scale if scale.ctypes.data % 4 == 0 else scale.copy())

    def expert(e: int, p: int) -> tuple[Projection, Projection, Projection] | None:
        if e in geometry.elsewhere:
            return None
        return projection("gate", e, p), projection("up", e, p), projection("down", e, p)

    rows = [[expert(e, p) for e in range(geometry.experts)] for p in range(geometry.parts)]
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
        [None if e in geometry.elsewhere else e for e in range(geometry.experts)],
        lambda e: _streams([expert for row in rows if (expert := row[e])], geometry),
        release=mapped.release,
    )


class _Mapped:
    """Tensors, each file mapped once."""

    def __init__(self, packed: PackedWeights) -> None:
        self._packed = packed
        self._files: dict[Path, tuple[mmap.mmap, Array]] = {}

    def get(self, tensor: TensorId) -> Array:
        place = self._packed.place(tensor)
        if place.file not in self._files:
            pages = map_pages(place.file)
            self._files[place.file] = pages, np.frombuffer(pages, np.uint8)
        return self._files[place.file][1][place.offset : place.offset + place.nbytes]

    def release(self) -> None:
        """Pages that were read do not count as this process's memory any more."""
        for pages, _ in self._files.values():
            pages.madvise(mmap.MADV_DONTNEED)


def _streams(parts: Sequence[Sequence[Projection]], geometry: Geometry) -> Streams:
    """What the packed matrices of an expert's parts stand for, unpacked by a path of its own."""

    def streamed(index: int, proj: Any) -> Streamed:
        rows, cols = matrix_shape(proj, geometry.hidden, geometry.intermediate)
        return Streamed(
            rows, cols, lambda: _pieces([part[index] for part in parts], proj, geometry)
        )

    gate, up, down = (streamed(index, proj) for index, proj in enumerate(PROJECTIONS))
    return gate, up, down


def _pieces(matrices: Sequence[Projection], proj: Any, geometry: Geometry) -> Iterator[Piece]:
    fmt = geometry.format
    assert fmt is not None
    for part, matrix in enumerate(matrices):
        place = split(proj, geometry.hidden, geometry.intermediate, part, len(matrices))
        rows, cols = place.shape
        for first in range(0, rows, piece_rows(cols)):
            here = slice(first, min(first + piece_rows(cols), rows))
            values = _unpacked(fmt, matrix, here, cols)
            start = place.row_start
            yield Piece(slice(start + here.start, start + here.stop), place.index[1], values)


def _unpacked(fmt: Format, matrix: Projection, rows: slice, cols: int) -> Array:
    """The values of some rows. Whole row blocks lie one behind the other."""
    assert matrix.scale is not None
    start, stop = (fmt.weight_nbytes(row, cols) for row in (rows.start, rows.stop))
    codes = native.audit_codes(fmt.key, matrix.codes[start:stop], rows.stop - rows.start, cols)
    step = matrix.scale.view(np.float32)[rows] * np.float32(fmt.scale_units)
    values: Array = codes * step[:, None]
    return values
