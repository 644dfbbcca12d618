"""How checkpoints store the experts of a layer: names and shapes of tensors, and what they mean.

Written from the formats' descriptions, without ktconv's reader. A layout is used in both
directions: `draw` makes tensors with random contents, `experts_of` finds the matrices in tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helpers.encoded import Rng, Stored
from helpers.families import Raw, Tensor, raw
from ktconv.source import Projection

F32 = NDArray[np.float32]
Shape = tuple[int, int]
Encode = Callable[[Rng, int, int], Stored]  # draws a matrix of rows and columns
Weights = Mapping[Projection, F32]  # [E, out, in] of each projection; no gate without one


@dataclass(frozen=True)
class Numbered:
    """A tensor for each matrix of each expert: {source}.{e}.{name}.weight."""

    names: Mapping[Projection, str]

    def draw(self, source: str, sizes: tuple[int, int, int], rng: Rng, of: Encode) -> Drawn:
        experts, inner, hidden = sizes
        for expert in range(experts):
            for projection, name in self.names.items():
                shape = (hidden, inner) if projection == "down" else (inner, hidden)
                yield f"{source}.{expert}.{name}.weight", of(rng, *shape)

    def read(self, get: Callable[[str], F32], source: str, experts: int) -> Weights:
        return {
            projection: np.stack([get(f"{source}.{e}.{name}.weight") for e in range(experts)])
            for projection, name in self.names.items()
        }


@dataclass(frozen=True)
class Stacked:
    """A tensor for all experts of a layer, [E, rows, columns], by the ends of their names;
    `split` makes gate, up and down of them, or up and down."""

    tensors: Mapping[str, Callable[[int, int], Shape]]  # of the inner and the outer size
    split: Callable[..., Sequence[F32]]

    def draw(self, source: str, sizes: tuple[int, int, int], rng: Rng, of: Encode) -> Drawn:
        experts, inner, hidden = sizes
        for name, shape in self.tensors.items():
            stored = [of(rng, *shape(inner, hidden)) for _ in range(experts)]
            yield f"{source}.{name}", _stack(stored)

    def read(self, get: Callable[[str], F32], source: str, experts: int) -> Weights:
        found = self.split(*(get(f"{source}.{name}") for name in self.tensors))
        names: tuple[Projection, ...] = ("gate", "up", "down")
        return dict(zip(names[-len(found) :], found, strict=True))


@dataclass(frozen=True)
class Rows(Stacked):
    """The same without an axis for experts, [E·rows, columns], as in DBRX."""

    def draw(self, source: str, sizes: tuple[int, int, int], rng: Rng, of: Encode) -> Drawn:
        for name, (tensors, values) in super().draw(source, sizes, rng, of):
            dtype, shape, data = raw(tensors["weight"])
            flat = Raw(dtype, (shape[0] * shape[1], shape[2]), data)
            yield name, ({"weight": flat}, values.reshape(flat.shape))

    def read(self, get: Callable[[str], F32], source: str, experts: int) -> Weights:
        def stacked(name: str) -> F32:
            flat = get(name)
            return flat.reshape(experts, -1, flat.shape[1])

        return super().read(stacked, source, experts)


Drawn = Iterator[tuple[str, Stored]]
Layout = Numbered | Stacked


def _stack(stored: Sequence[Stored]) -> Stored:
    """Weights of several experts as one tensor for each part, with a leading axis."""
    tensors: dict[str, Tensor] = {}
    for part in stored[0][0]:
        each = [raw(parts[part]) for parts, _ in stored]
        data = b"".join(one.data for one in each)
        tensors[part] = Raw(each[0].dtype, (len(each), *each[0].shape), data)
    return tensors, np.stack([values for _, values in stored])


def _turned(values: F32) -> F32:
    return values.swapaxes(1, 2)


def _halves(gate_up: F32, down: F32) -> Sequence[F32]:
    return (*np.split(gate_up, 2, axis=1), down)


def _in_turn(gate_up: F32, down: F32) -> Sequence[F32]:
    return gate_up[:, 0::2], gate_up[:, 1::2], down


def _fused(gate_up: str, down: str, split: Callable[..., Sequence[F32]] = _halves) -> Stacked:
    """[E, 2I, H] and [E, H, I]."""
    return Stacked({gate_up: lambda i, h: (2 * i, h), down: lambda i, h: (h, i)}, split)


def _fused_turned(
    gate_up: str, down: str, split: Callable[..., Sequence[F32]] = _halves
) -> Stacked:
    """[E, H, 2I] and [E, I, H]."""
    return Stacked(
        {gate_up: lambda i, h: (h, 2 * i), down: lambda i, h: (i, h)},
        lambda first, second: split(_turned(first), _turned(second)),
    )


_SEPARATE = Stacked(
    {
        "gate_proj.weight": lambda i, h: (i, h),
        "up_proj.weight": lambda i, h: (i, h),
        "down_proj.weight": lambda i, h: (h, i),
    },
    lambda *stored: stored,
)

LAYOUTS: Mapping[str, Layout] = {
    "N": Numbered({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
    "W": Numbered({"gate": "w1", "up": "w3", "down": "w2"}),
    "U": Numbered({"up": "up_proj", "down": "down_proj"}),
    "F1": _fused("gate_up_proj", "down_proj"),
    "F12": _fused("w13_weight", "w2_weight"),
    "F14": _fused("fc", "proj"),
    "F2": _fused_turned("gate_up_proj", "down_proj"),
    "F3": _fused_turned("gate_up_proj", "down_proj", _in_turn),
    "F4": _fused("gate_up_proj", "down_proj", _in_turn),
    "F5": _fused("w13_weight", "w2_weight", _in_turn),
    "F6": _SEPARATE,
    "F7": _fused("input_linear.weight", "output_linear.weight"),
    "F8": _fused_turned("fc1.weight", "fc2.weight"),
    "F9": Rows(
        dict.fromkeys(("mlp.w1", "mlp.v1", "mlp.w2"), lambda i, h: (i, h)),
        lambda gate, up, down: (gate, up, _turned(down)),
    ),
    "F13": Rows(
        dict.fromkeys(("mlp.w1", "mlp.w2"), lambda i, h: (i, h)),
        lambda up, down: (up, _turned(down)),
    ),
    "F11": Stacked(
        {"up_proj": lambda i, h: (i, h), "down_proj": lambda i, h: (h, i)},
        lambda *stored: stored,
    ),
}


def draw(
    layout: str, source: str, sizes: tuple[int, int, int], rng: Rng, of: Encode
) -> tuple[dict[str, Tensor], Weights]:
    """The tensors of a layer of (experts, inner, outer) size, and the weights in them."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, F32] = {}
    for name, (parts, found) in LAYOUTS[layout].draw(source, sizes, rng, of):
        values[name] = found
        stem = name.removesuffix("weight")
        for part, tensor in parts.items():
            end = part if stem != name else part.removeprefix("weight")
            tensors[stem + end] = tensor
    return tensors, LAYOUTS[layout].read(values.__getitem__, source, sizes[0])


class Found(NamedTuple):
    weights: Weights
    names: frozenset[str]  # of their tensors


def experts_of(layout: str, source: str, experts: int, tensors: Mapping[str, Raw]) -> Found:
    """The experts of a layer that is stored in BF16."""
    names = set()

    def get(name: str) -> F32:
        names.add(name)
        return _values(tensors[name])

    weights = LAYOUTS[layout].read(get, source, experts)
    return Found(weights, frozenset(names))


def biases_of(layout: str, source: str, tensors: Mapping[str, Raw]) -> Found:
    """The biases of a layer, [E, out] of each projection."""
    names = [f"{source}.{name}_bias" for name in ("gate_up_proj", "down_proj")]
    gate_up, down = (_values(tensors[name]) for name in names)
    split = _halves if layout == "F2" else _in_turn
    gate, up, down = split(gate_up, down)
    return Found({"gate": gate, "up": up, "down": down}, frozenset(names))


def _values(tensor: Raw) -> F32:
    dtype, shape, data = tensor
    if dtype == "F32":
        return np.frombuffer(data, "<f4").reshape(shape)
    assert dtype == "BF16"
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
