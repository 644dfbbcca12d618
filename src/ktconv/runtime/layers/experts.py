"""The experts of a layer: packed for the kernels, and as float32 for the readable reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import erf, sqrt
from typing import NoReturn

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import Format, formats_for, reference
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16, round_to_bf16
from ktconv.formats.groups import grouped
from ktconv.native import Activation, Expert, Pool
from ktconv.runtime.layers.blocks import Block, part_shapes
from ktconv.source.reading.streamed import Streamed, Streams, whole
from ktconv.system.arrays import F32, U16, Array

# gate [I, H] (None: experts without one), up [I, H], down [H, I]
Matrices = tuple[F32 | None, F32, F32]
GatedMatrices = tuple[F32, F32, F32]

# Of the relative error against arithmetic with activations rounded as the kernels round them: y is
# bf16, 2^-9 at most; the rest is for sums in another order.
KERNEL_BOUND = 0.005
TOKENS_AT_ONCE = 512  # of an expert in float32: what one token more takes is not needed twice
_KEPT = 4  # experts whose quantized matrices are kept as numbers


class Quantized(Struct, frozen=True):
    """A matrix [N, K] as plain codes and scales (kt_pack's), and the values that they mean."""

    codes: Array
    scale: Array | None
    values: F32


class OutputNorm(Struct, frozen=True):
    """An RMS norm of each expert's output, before the router's weight."""

    weight: F32  # [H]; outputs are multiplied by 1 + weight before they are normalised
    epsilon: float  # is added to their mean square

    def of(self, outputs: F32) -> F32:
        """[M, H] of [M, H]."""
        scaled = outputs * (1 + self.weight)
        mean = np.mean(np.square(scaled), axis=1, keepdims=True, dtype=np.float32)
        result: F32 = scaled / np.sqrt(mean + np.float32(self.epsilon))
        return result


class Experts:
    """A layer's experts.

    Expert e has the matrices `origins[e]`: the reference computes experts that share them
    together. `streams(o)` are the dequantized weights of origin o, `source(o)` those that they
    were quantized from, where known. `norm` is that of their outputs, if there is one;
    `weight_on_input`: the model multiplies inputs by the router's weights, which callers of
    `forward` do themselves. `release()` gives pages of mapped weights back to the system;
    they are read again when they are needed. `held`: how weights are in memory, as
    `ktconv.runtime.memory` calls it, with a `note` where something was not possible.
    """

    def __init__(
        self,
        format: Format,
        layer: native.Layer,
        activation: Activation,
        origins: Sequence[int | None],
        streams: Callable[[int], Streams],
        source: Callable[[int], Matrices] | None = None,
        release: Callable[[], None] = lambda: None,
        norm: OutputNorm | None = None,
        weight_on_input: bool = False,
        held: str = "copy",
        note: str = "",
    ) -> None:
        self.held, self.note = held, note
        self.norm, self.weight_on_input = norm, weight_on_input
        self.format, self.layer, self.activation = format, layer, activation
        self.streams, self.source, self.release = streams, source, release
        self.origins = np.array([-1 if origin is None else origin for origin in origins])
        self.hidden, self.intermediate = layer.hidden, layer.intermediate
        self.count, self.parts = layer.experts, layer.parts

    def with_activation(self, activation: Activation) -> Experts:
        """Experts with these weights, in the same memory, under another activation. ValueError for
        one that needs a gate where there is none, or none where there is one."""
        made, layer = object.__new__(Experts), self.layer.with_activation(activation)
        vars(made).update(vars(self), layer=layer, activation=activation)
        return made

    def __deepcopy__(self, memo: object) -> Experts:
        """Itself: no call changes it, so copies of a model share it."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "packed experts cannot be pickled, as their weights are memory of this process",
            "load them where they are needed: processes share the pages of an OUTPUT",
        )

    @property
    def biased(self) -> bool:
        """Whether matrices have biases."""
        return self.layer.biased

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, scales included."""
        gated = self.activation.gated
        return self.format.expert_bytes(self.hidden, self.intermediate, self.parts, gated=gated)

    def loaded(self, origin: int) -> Streams:
        """The matrices of `streams`, in memory whole."""
        gate, up, down = self.streams(origin)
        return None if gate is None else _loaded(gate), _loaded(up), _loaded(down)

    def forward(self, x: U16, ids: Array, weights: F32, pool: Pool) -> U16:
        """y [M, H] of x [M, H], both bf16 bits; ids and weights [M, K], an id of -1 is skipped."""
        if self.norm is None:
            return self._forward(x, ids, weights, pool)
        # The kernels add up experts: each slot is a token of its own until outputs are normalised.
        each = np.ones((ids.size, 1), np.float32)
        alone = self._forward(np.repeat(x, ids.shape[1], axis=0), ids.reshape(-1, 1), each, pool)
        return f32_to_bf16(self.normed(alone, ids, weights))

    def normed(self, alone: U16, ids: Array, weights: F32) -> F32:
        """y [M, H] of experts whose outputs are normalised; alone [M * K, H]: the output of each
        token's experts before that, bf16 bits."""
        assert self.norm is not None
        outputs = self.norm.of(bf16_to_f32(alone)).reshape(*ids.shape, -1)
        chosen = np.where(ids < 0, np.float32(0), weights)
        summed: F32 = np.einsum("tkh,tk->th", outputs, chosen)
        return summed

    def _forward(self, x: U16, ids: Array, weights: F32, pool: Pool) -> U16:
        y = np.empty_like(x)
        tokens, top_k = ids.shape
        scratch = self.layer.scratch(tokens, top_k, pool)
        self.layer.call(pool, x, ids, weights, y, scratch)()
        return y

    def reference(
        self,
        x: U16,
        ids: Array,
        weights: F32,
        matrices: Callable[[int], Matrices | Streams] | None = None,
        *,
        rounded: bool = False,
    ) -> F32:
        """Forward in float32, on the weights' values and biases or on other `matrices` of each
        origin.

        `rounded`: with activations rounded where the kernels round them.
        """
        inputs = bf16_to_f32(x)
        y = np.zeros_like(inputs)
        origins = np.where(ids >= 0, self.origins[ids], -1)
        for origin in np.unique(origins[ids >= 0]):
            token, slot = np.nonzero(origins == origin)
            if origin < 0:
                raise IndexError("an expert that is not present")
            expert = _whole(matrices(int(origin))) if matrices else self.streams(int(origin))
            result = self.output(expert, inputs[token], rounded)
            np.add.at(y, token, weights[token, slot, None] * result)
        return y

    def output(self, expert: Streams, x: F32, rounded: bool = False) -> F32:
        """One expert's output [M, H] in float32. `rounded`: activations as kernels round them;
        rows of x that are so already stay as they are."""
        if not rounded:
            return expert_output(expert, self.activation, x, norm=self.norm)
        rounded_x = round_activations(self.format, x)
        return expert_output(expert, self.activation, rounded_x, self._rounded, self.norm)

    def outputs(self, expert: Streams, x: F32) -> tuple[F32, F32]:
        """`output` without and with rounding, from one pass over the matrices."""

        def between(middle: F32) -> F32:
            return np.concatenate([middle[: len(x)], self._rounded(middle[len(x) :])])

        both = np.concatenate([x, round_activations(self.format, x)])
        y = expert_output(expert, self.activation, both, between, self.norm)
        return y[: len(x)], y[len(x) :]

    def _rounded(self, middle: F32) -> F32:
        """Each part rounds what it has of the activations between the products."""
        cuts = np.split(middle, self.parts, axis=1)
        return np.concatenate([round_activations(self.format, cut) for cut in cuts], axis=1)


def expert_output(
    expert: Streams,
    activation: Activation,
    x: F32,
    between: Callable[[F32], F32] = lambda middle: middle,
    norm: OutputNorm | None = None,
) -> F32:
    """One expert's output [M, H] of x [M, H]; `between` sees what goes into the last product."""
    gate, up, down = expert
    inner = gated(activation, None if gate is None else gate.product(x), up.product(x))
    outputs = down.product(between(inner))
    return outputs if norm is None else norm.of(outputs)


def round_activations(fmt: Format, values: F32) -> F32:
    """Rows as the kernels see them: int8 with a scale per row or group, or bf16."""
    if fmt.activations == "bf16":
        return round_to_bf16(values)
    runs = grouped(values, fmt.group or values.shape[1])
    scale = np.abs(runs).max(axis=2, keepdims=True) * np.float32(1 / 127)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    rounded: F32 = (np.rint(runs * inverse) * scale).reshape(values.shape)
    return rounded


def in_blocks(compute: Callable[[F32], tuple[F32, ...]], x: F32) -> tuple[F32, ...]:
    """Call `compute` with the rows of x, TOKENS_AT_ONCE at a time."""
    blocks = [x[first : first + TOKENS_AT_ONCE] for first in range(0, len(x), TOKENS_AT_ONCE)]
    return tuple(map(np.concatenate, zip(*map(compute, blocks), strict=True)))


def _loaded(matrix: Streamed) -> Streamed:
    return whole(matrix.values(), matrix.bias)


def _whole(matrices: Matrices | Streams) -> Streams:
    gate, up, down = matrices
    return None if gate is None else _streamed(gate), _streamed(up), _streamed(down)


def _streamed(matrix: F32 | Streamed) -> Streamed:
    return matrix if isinstance(matrix, Streamed) else whole(matrix)


def gated(activation: Activation, gate: F32 | None, up: F32) -> F32:
    """The activation of ktconv.h's kt_activation, in float32. ValueError for a gate where the
    function has none, or none where it needs one."""
    if activation.gated != (gate is not None):
        raise ValueError(f"experts with {activation.function}: a gate too many or too few")
    limit, alpha, beta = map(np.float32, (activation.limit, activation.alpha, activation.beta))
    u: F32 = np.clip(up, -limit, limit)
    if gate is None:
        return _ungated(activation.function, u)
    g: F32 = np.minimum(gate, limit)
    match activation.function:
        case "gelu":
            result: F32 = _gelu(g) * u
        case "gelu_tanh":
            result = _gelu_tanh(g) * u
        case "swiglu_clamped":
            result = np.minimum(gate * _sigmoid(gate), limit) * u
        case "softcap":
            result = _capped(g, alpha) * _sigmoid(g) * _capped(u, beta)
        case _:
            result = g * _sigmoid(alpha * g) * (u + beta)
    return result


def _ungated(function: str, u: F32) -> F32:
    if function == "ungated_gelu":
        return _gelu(u)
    if function == "ungated_gelu_tanh":
        return _gelu_tanh(u)
    positive: F32 = np.maximum(u, np.float32(0))
    return np.square(positive) if function == "relu2" else positive


def _gelu(x: F32) -> F32:
    steps = np.vectorize(erf, otypes=[np.float64])(x / sqrt(2)).astype(np.float32)
    result: F32 = x * (1 + steps) / 2
    return result


def _gelu_tanh(x: F32) -> F32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    result: F32 = x * (1 + np.tanh(inner)) / 2
    return result


def _sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        result: F32 = np.float32(1) / (1 + np.exp(-x))
    return result


def _capped(x: F32, cap: np.float32) -> F32:
    if np.isinf(cap):
        return x
    result: F32 = cap * np.tanh(x / cap)
    return result


def pack_experts(
    fmt: Format,
    source: Callable[[int], Matrices],
    origins: Sequence[int | None],
    hidden: int,
    intermediate: int,
    *,
    parts: int = 1,
    activation: Activation | None = None,
    bind: Callable[[Array, int], None] | None = None,
) -> Experts:
    """Quantizes (round to nearest, for benchmarks and tests) and packs; expert e has the matrices
    `origins[e]` of `source`, or is not there (None).

    Experts that share matrices are quantized once, but each has memory of its own. All experts of
    a part are in one block of memory, so that it can have huge pages; `bind` gets it and the part's
    number before anything is written to it. `source` has no gates where the activation has none.
    UsageError for a shape that the format does not allow.
    """
    check_shape(fmt, hidden, intermediate, parts)
    chosen = activation or Activation()
    of_parts = lru_cache(_KEPT)(lambda origin: _quantize(fmt, source(origin), parts))
    here = [index for index, origin in enumerate(origins) if origin is not None]
    places: list[dict[int, Expert]] = []  # of each part
    for part in range(parts):
        block = Block(fmt, part_shapes(hidden, intermediate // parts, chosen.gated), len(here))
        if bind:
            bind(block.memory, part)
        places.append({index: block.expert(n) for n, index in enumerate(here)})
    for origin in sorted({origin for origin in origins if origin is not None}):
        first, *copies = (index for index, other in enumerate(origins) if other == origin)
        for own, matrices in zip(places, of_parts(origin), strict=True):
            _pack(fmt, own[first], matrices)
            for index in copies:
                _copy(own[index], own[first])

    rows = [[own.get(index) for index in range(len(origins))] for own in places]
    layer = native.Layer(fmt.layout, chosen, hidden, intermediate, rows)
    return Experts(
        fmt, layer, chosen, origins, lambda origin: _whole(_joined(of_parts(origin))), source
    )


def _pack(fmt: Format, place: Expert, matrices: Sequence[Quantized | None]) -> None:
    for projection, matrix in zip(place, matrices, strict=True):
        if projection is None or matrix is None:
            continue  # the gate, of all three
        rows, cols = matrix.values.shape
        scale = native.pack_weight(
            fmt.layout, rows, cols, matrix.codes, matrix.scale, projection.codes
        )
        if projection.scale is not None:
            projection.scale[:] = scale


def _copy(place: Expert, packed: Expert) -> None:
    for new, old in zip(place, packed, strict=True):
        if new is None or old is None:
            continue
        new.codes[:] = old.codes
        if new.scale is not None and old.scale is not None:
            new.scale[:] = old.scale


def check_shape(fmt: Format, hidden: int, intermediate: int, parts: int) -> None:
    """UsageError that names the dimension which the format or its kernels do not allow."""
    if parts < 1:
        raise UsageError(f"{parts} parts: at least 1 is needed", "choose 1 or more parts")
    if fmt.multiplies(hidden, intermediate, parts):
        return
    if intermediate % parts:
        raise UsageError(
            f"intermediate size {intermediate} cannot be split into {parts} parts",
            "choose a number of parts that divides it",
        )
    width, step = intermediate // parts, fmt.traits.col_multiple
    for what, size in (("hidden size", hidden), ("intermediate size of a part", width)):
        if size > native.MAX_COLS:
            raise UsageError(
                f"{fmt.key} does not support {what} {size}: kernels read at most "
                f"{native.MAX_COLS} columns",
                "split it into more parts" if size == width else "no method supports it",
            )
        if size % step:
            able = formats_for(hidden, intermediate, parts)
            raise UsageError(
                f"{fmt.key} does not support {what} {size}: it must be a multiple of {step}",
                f"methods that support it: {', '.join(able)}"
                if able
                else "all need multiples of 32",
            )
    raise UsageError(f"{fmt.key} does not support hidden {hidden}, intermediate {width}")


def _cut(matrices: Matrices, parts: int) -> list[Matrices]:
    gate, up, down = matrices
    width = len(up) // parts
    cuts = [slice(part * width, (part + 1) * width) for part in range(parts)]
    return [(None if gate is None else gate[cut], up[cut], down[:, cut]) for cut in cuts]


def quantized(fmt: Format, matrix: F32) -> Quantized:
    """Quantize by the C library where it has a quantizer, else by the reference."""
    matrix = np.ascontiguousarray(matrix)
    if fmt.traits.max_level:
        source = native.Matrix(matrix.view(np.uint8).reshape(-1), "F32", *matrix.shape)
        codes, scale = native.quantize(fmt.layout, source)
    else:
        codes, scale = reference.quantize(fmt, matrix)
    return Quantized(codes, scale, reference.dequantize(fmt, codes, scale))


def _quantize(fmt: Format, matrices: Matrices, parts: int) -> list[list[Quantized | None]]:
    """Gate, up and down of each part."""
    return [
        [None if matrix is None else quantized(fmt, matrix) for matrix in cut]
        for cut in _cut(matrices, parts)
    ]


def _joined(quantized: list[list[Quantized | None]]) -> Matrices:
    """The values of whole matrices from those of all parts."""
    gates, ups, downs = (
        [matrix.values for matrix in matrices if matrix is not None]
        for matrices in zip(*quantized, strict=True)
    )
    gate = np.concatenate(gates) if gates else None
    return gate, np.concatenate(ups), np.concatenate(downs, axis=1)
