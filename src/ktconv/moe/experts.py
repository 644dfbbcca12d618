"""The experts of a layer: packed for the kernels, and as numbers for the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats.decode import bf16_to_f32
from ktconv.moe.methods import Method
from ktconv.native import Activation, Pool, Projection

Array = NDArray[Any]
F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Matrices = tuple[F32, F32, F32]  # gate [I, H], up [I, H], down [H, I]

PROJECTIONS = 3


class Experts:
    """A layer's experts. `values(e)` is what the packed weights of expert e stand for."""

    def __init__(
        self,
        method: Method,
        layer: native.Layer,
        activation: Activation,
        values: Callable[[int], Matrices],
    ) -> None:
        self.method, self.layer, self.activation, self.values = method, layer, activation, values
        self.hidden, self.intermediate = layer.hidden, layer.intermediate
        self.count, self.parts = layer.experts, layer.parts

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, scales included."""
        return self.method.expert_bytes(self.hidden, self.intermediate, self.parts)

    def operations(self, pairs: int) -> int:
        """Multiplications and additions of `pairs` (token, expert) pairs."""
        return pairs * PROJECTIONS * 2 * self.hidden * self.intermediate

    def forward(self, x: U16, ids: Array, weights: F32, pool: Pool) -> U16:
        """y [M, H] of x [M, H], both bf16 bits; ids and weights [M, K], an id of -1 is skipped."""
        y = np.empty_like(x)
        tokens, top_k = ids.shape
        scratch = self.layer.scratch(tokens, top_k, pool)
        self.layer.call(pool, x, ids, weights, y, scratch)()
        return y

    def reference(self, x: U16, ids: Array, weights: F32) -> F32:
        """The same in float32 on the weights' values, expert by expert."""
        inputs = bf16_to_f32(x)
        y = np.zeros_like(inputs)
        for expert in np.unique(ids[ids >= 0]):
            token, slot = np.nonzero(ids == expert)
            gate, up, down = self.values(int(expert))
            middle = gated(self.activation, inputs[token] @ gate.T, inputs[token] @ up.T)
            np.add.at(y, token, weights[token, slot, None] * (middle @ down.T))
        return y


def gated(activation: Activation, gate: F32, up: F32) -> F32:
    """The activation of ktconv.h's kt_activation, in float32."""
    g = np.minimum(gate, np.float32(activation.limit))
    u = np.clip(up, np.float32(-activation.limit), np.float32(activation.limit))
    if activation.function == "gelu":
        from math import erf, sqrt

        steps = np.vectorize(erf)(g / sqrt(2)).astype(np.float32)
        result: F32 = g * (1 + steps) / 2 * u
    elif activation.function == "gelu_tanh":
        inner = np.float32(np.sqrt(2 / np.pi)) * (g + np.float32(0.044715) * g**3)
        result = g * (1 + np.tanh(inner)) / 2 * u
    else:
        with np.errstate(over="ignore"):
            sigmoid = 1 / (1 + np.exp(-np.float32(activation.alpha) * g))
        result = g * sigmoid * (u + np.float32(activation.beta))
    return result


def pack_experts(
    method: Method,
    source: Callable[[int], Matrices],
    experts: Sequence[int | None],
    hidden: int,
    intermediate: int,
    *,
    parts: int = 1,
    activation: Activation | None = None,
) -> Experts:
    """Quantizes and packs; `experts[e]` says which matrices of `source` expert e has.

    Experts that share matrices are packed once and copied, so that each has memory of its own.
    None: that expert is not here. Raises UsageError where the method cannot hold the shape.
    """
    check_shape(method, hidden, intermediate, parts)
    chosen = activation or Activation()
    packed: dict[int, list[tuple[Projection, Projection, Projection]]] = {}
    rows: list[list[tuple[Projection, Projection, Projection] | None]]
    rows = [[None] * len(experts) for _ in range(parts)]
    for index, origin in enumerate(experts):
        if origin is None:
            continue
        if origin in packed:
            done = [_copy(expert) for expert in packed[origin]]
        else:
            done = packed[origin] = _pack_expert(method, source(origin), parts)
        for part, expert in enumerate(done):
            rows[part][index] = expert

    def values(index: int) -> Matrices:
        origin = experts[index]
        if origin is None:
            raise IndexError(f"expert {index} is not here")
        return _restored(method, source(origin), parts)

    layer = native.Layer(method.layout, chosen, hidden, intermediate, rows)
    return Experts(method, layer, chosen, values)


def check_shape(method: Method, hidden: int, intermediate: int, parts: int) -> None:
    """UsageError that names the dimension which the method cannot hold."""
    if method.holds(hidden, intermediate, parts):
        return
    if intermediate % parts:
        raise UsageError(
            f"intermediate size {intermediate} cannot be cut into {parts} parts",
            "choose a number of parts that divides it",
        )
    rows, cols = method.steps()
    width = intermediate // parts
    for what, size in (("hidden size", hidden), ("intermediate size of a part", width)):
        step = max(rows, cols)
        if size % step:
            raise UsageError(
                f"{method.name} cannot hold {what} {size}: it must be a multiple of {step}",
                "bf16 and mxfp4 need multiples of 32 only",
            )
    raise UsageError(f"{method.name} cannot hold hidden {hidden}, intermediate {width}")


def _cut(matrices: Matrices, parts: int) -> list[Matrices]:
    gate, up, down = matrices
    width = len(gate) // parts
    cuts = [slice(part * width, (part + 1) * width) for part in range(parts)]
    return [(gate[cut], up[cut], np.ascontiguousarray(down[:, cut])) for cut in cuts]


def _pack_expert(
    method: Method, matrices: Matrices, parts: int
) -> list[tuple[Projection, Projection, Projection]]:
    done = []
    for cut in _cut(matrices, parts):
        gate, up, down = (_pack_matrix(method, matrix) for matrix in cut)
        done.append((gate, up, down))
    return done


def _pack_matrix(method: Method, matrix: F32) -> Projection:
    quantized = method.quantize(np.ascontiguousarray(matrix), method.layout)
    rows, cols = matrix.shape
    packed = native.aligned_bytes(method.layout.weight_size(rows, cols))
    scale = native.pack_weight(method.layout, rows, cols, quantized.codes, quantized.scale, packed)
    return Projection(packed, scale)


def _copy(expert: tuple[Projection, ...]) -> tuple[Projection, Projection, Projection]:
    def again(memory: Array) -> Array:
        new = native.aligned_bytes(memory.nbytes)
        new[:] = memory
        return new

    gate, up, down = (
        Projection(again(p.codes), None if p.scale is None else again(p.scale)) for p in expert
    )
    return gate, up, down


def _restored(method: Method, matrices: Matrices, parts: int) -> Matrices:
    cuts = [
        [method.quantize(np.ascontiguousarray(m), method.layout).values for m in cut]
        for cut in _cut(matrices, parts)
    ]
    gates, ups, downs = zip(*cuts, strict=True)
    return np.concatenate(gates), np.concatenate(ups), np.concatenate(downs, axis=1)
