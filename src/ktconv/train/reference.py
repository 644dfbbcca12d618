"""Experts with LoRA computed in plain torch: the truth of tests, `bench` and `verify`.

Autograd makes the gradients. Nothing here is shared with the kernels: weights are dequantized by
the decoders that check a conversion, and every product is torch's own.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from ktconv.errors import UsageError
from ktconv.native import GATE_FUNCTIONS, Activation, isa
from ktconv.runtime import MoELayer
from ktconv.runtime.layers import Experts

ROUNDINGS = ("none", "bf16", "int8", "group")


class Base(NamedTuple):
    """The frozen weights of E experts, fp32 (or float64, in which `reference` computes then)."""

    gate: Tensor | None  # [E, I, H]; None: experts without a gate
    up: Tensor  # [E, I, H]
    down: Tensor  # [E, H, I]
    gate_bias: Tensor | None = None  # [E, I]
    up_bias: Tensor | None = None  # [E, I]
    down_bias: Tensor | None = None  # [E, H]

    @classmethod
    def of(cls, layer: MoELayer | Experts) -> Base:
        """The exact values of packed weights, 4 bytes each. Experts whose weights are not here are
        NaN, as nobody may ask for them."""
        packed = layer.packed if isinstance(layer, MoELayer) else layer
        found = [_dequantized(packed, int(origin)) for origin in packed.origins]
        shown = next((one for one in found if one), None)
        if shown is None:
            raise UsageError("the layer has no weights of any expert")
        there = [one or tuple(_nothing(part) for part in shown) for one in found]
        return cls._make(_stacked(parts) for parts in zip(*there, strict=True))


class Lora(NamedTuple):
    """Low-rank matrices: each W counts as W + scale * B A. None: not there, both of a pair."""

    gate_a: Tensor | None = None  # [E, r, H]
    gate_b: Tensor | None = None  # [E, I, r]
    up_a: Tensor | None = None  # [E, r, H]
    up_b: Tensor | None = None  # [E, I, r]
    down_a: Tensor | None = None  # [E, r, I]
    down_b: Tensor | None = None  # [E, H, r]
    scale: float = 1.0  # alpha / r


class KernelRounding(TypedDict):
    """The arguments of `reference` that say what the kernels do for a layer."""

    activation: Activation
    rounding: str
    group: int
    parts: int


def as_kernels(layer: MoELayer | Experts, *, trained: bool = False) -> KernelRounding:
    """`reference(x, ids, weights, Base.of(layer), **as_kernels(layer))` is `layer(x, ids, weights)`
    up to the order of sums, without norms of outputs and weights on inputs. trained: with LoRA in
    fine-tuning, where AMX reads bf16 next to integers in groups of up to 64 columns."""
    packed = layer.packed if isinstance(layer, MoELayer) else layer
    fmt = packed.format
    rounding = "bf16" if fmt.activations == "bf16" else "group" if fmt.group else "int8"
    if trained and rounding == "group" and fmt.group <= 64 and isa() == "amx":
        rounding = "bf16"
    return KernelRounding(
        activation=packed.activation, rounding=rounding, group=fmt.group, parts=packed.parts
    )


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    base: Base,
    lora: Lora | None = None,
    *,
    activation: Activation | None = None,
    rounding: str = "none",
    group: int = 0,
    parts: int = 1,
    dropped: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """y[t] = sum over k of weights[t, k] * expert ids[t, k] of x[t], in the dtype of `base`.

    x and y [T, H], ids and weights [T, K]. Ids outside [0, E) are skipped, one that a token has
    twice counts twice. The backward takes every rounding for the identity.

    rounding  of the activations that base products read, as formats' kernels do it: "none"; "bf16";
              "int8", 127 levels up to the largest of a row; "group", of `group` columns. LoRA reads
              them in bf16, but with "none"
    parts     number of pieces of the middle for "int8", each with its own scale of a row
    dropped   dropout: factors 0 or 1 / (1 - p) of what A reads of x [T, K, H], and of the middle
              [T, K, I]

    UsageError for shapes that do not fit and unknown roundings.
    """
    how = _Arithmetic(activation or Activation(), rounding, group, parts)
    lora = lora or Lora()
    _check(how, x, ids, weights, base)
    x, weights = x.to(base.up.dtype), weights.to(base.up.dtype)
    if rounding != "none":
        x = _to_bf16(x)
    of_expert = _each(base, lora)
    y = torch.zeros_like(x)
    # Of one expert at least, so that a call without any has gradients too: zeros.
    for expert in torch.unique(ids[(ids >= 0) & (ids < len(base.up))]).tolist() or [0]:
        token, slot = torch.where(ids == expert)
        drops = (dropped[0][token, slot], dropped[1][token, slot]) if dropped else (1.0, 1.0)
        out = _output(how, of_expert[expert], x[token], drops)
        y = y.index_add(0, token, weights[token, slot, None] * out)
    return y


class _Arithmetic(NamedTuple):
    activation: Activation
    rounding: str
    group: int
    parts: int

    def for_base(self, x: Tensor) -> Tensor:
        """Activations as base products read them."""
        if self.rounding in ("none", "bf16"):
            return self.for_lora(x)
        group = self.group if self.rounding == "group" else 0
        return _passed(x, _in_levels(x.detach(), group))

    def for_lora(self, x: Tensor) -> Tensor:
        return x if self.rounding == "none" else _to_bf16(x)

    def middle_for_base(self, middle: Tensor) -> Tensor:
        """Each part rounds what it has of the middle."""
        cuts = middle.tensor_split(self.parts, dim=1)
        return torch.cat([self.for_base(cut) for cut in cuts], dim=1)


def _output(how: _Arithmetic, own: tuple[Base, Lora], x: Tensor, drops: tuple[Any, Any]) -> Tensor:
    """One expert's output [M, H] of x [M, H]; `own` are its matrices."""
    base, lora = own
    read, s = how.for_base(x), lora.scale
    for_lora = how.for_lora(x) * drops[0]
    up = linear(read, base.up, base.up_bias) + _low_rank(how, for_lora, lora.up_a, lora.up_b, s)
    gate = None
    if base.gate is not None:
        gate = linear(read, base.gate, base.gate_bias)
        gate = gate + _low_rank(how, for_lora, lora.gate_a, lora.gate_b, s)
    middle = middle_of(how.activation, gate, up)
    for_lora = how.for_lora(middle) * drops[1]
    out = linear(how.middle_for_base(middle), base.down, base.down_bias)
    return out + _low_rank(how, for_lora, lora.down_a, lora.down_b, s)


def _low_rank(
    how: _Arithmetic, x: Tensor, a: Tensor | None, b: Tensor | None, scale: float
) -> Tensor | float:
    if a is None or b is None:
        return 0.0
    return linear(how.for_lora(scale * linear(x, a.to(x.dtype))), b.to(x.dtype))


def middle_of(activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
    """The activation of ktconv.h's kt_activation, [M, I]."""
    limit, alpha, beta = activation.limit, activation.alpha, activation.beta
    u = _clamped(up, -limit, limit)
    if gate is None:
        return _ungated(activation.function, u)
    g = _clamped(gate, -inf, limit)
    match activation.function:
        case "gelu":
            return gelu(g) * u
        case "gelu_tanh":
            return gelu(g, approximate="tanh") * u
        case "swiglu_clamped":
            return _clamped(gate * gate.sigmoid(), -inf, limit) * u
        case "softcap":
            return _capped(g, alpha) * g.sigmoid() * _capped(u, beta)
        case _:
            return g * (alpha * g).sigmoid() * (u + beta)


def relative(found: Any, expected: Any) -> float:
    """The norm of the difference over that of `expected` (1 where that is 0), in float64."""
    found, expected = (torch.as_tensor(one).detach().double() for one in (found, expected))
    norm = float(expected.norm())
    return float((found - expected).norm()) / (norm or 1.0)


def _ungated(function: str, u: Tensor) -> Tensor:
    match function:
        case "ungated_gelu":
            return gelu(u)
        case "ungated_gelu_tanh":
            return gelu(u, approximate="tanh")
        case "relu2":
            return _nan_kept(u, u.relu()).square()
        case _:
            return _nan_kept(u, u.relu())


def _clamped(x: Tensor, low: float, high: float) -> Tensor:
    return _nan_kept(x, x.clamp(low, high))


def _nan_kept(x: Tensor, values: Tensor) -> Tensor:
    """`values`, but NaN where x is, as is the derivative there: torch would have 0."""
    nan = x.isnan()
    return torch.where(nan, x.where(nan, 0).square(), values)


def _capped(x: Tensor, cap: float) -> Tensor:
    return x if cap == inf else cap * (x / cap).tanh()


def _each(base: Base, lora: Lora) -> list[tuple[Base, Lora]]:
    """The matrices of each expert. (By `unbind`, as gradients by index would each be whole.)"""
    count = len(base.up)
    stacks = (*base, *lora[:6])
    each = zip(*([None] * count if one is None else one.unbind() for one in stacks), strict=True)
    return [(Base._make(own[:6]), Lora._make([*own[6:], lora.scale])) for own in each]


# ---- roundings, which count as the identity in the backward -----------------


def _to_bf16(x: Tensor) -> Tensor:
    return _passed(x, x.detach().to(torch.bfloat16).to(x.dtype))


def _in_levels(x: Tensor, group: int) -> Tensor:
    """Rows, or groups of them, as int8 codes times a scale, in fp32 as in the kernels."""
    width = group or x.shape[1]
    runs = x.float().reshape(len(x), x.shape[1] // width, width)
    scale = runs.abs().amax(dim=2, keepdim=True) * float(np.float32(1 / 127))
    inverse = torch.where(scale < torch.finfo(torch.float32).tiny, 0, 1 / scale)
    codes = (runs * inverse).round()
    return (codes * scale).reshape(x.shape).to(x.dtype)


class _Passed(torch.autograd.Function):
    """The second argument; its gradient goes to the first."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _passed(given: Tensor, rounded: Tensor) -> Tensor:
    found: Tensor = _Passed.apply(given, rounded)  # type: ignore[no-untyped-call]
    return found


# ---- weights and arguments --------------------------------------------------


def _dequantized(packed: Experts, origin: int) -> tuple[Any, ...] | None:
    if origin < 0:
        return None
    streams = packed.streams(origin)
    values = [None if one is None else one.values() for one in streams]
    return (*values, *(None if one is None else one.bias for one in streams))


def _nothing(like: Any) -> Any:
    return None if like is None else np.full_like(like, np.nan)


def _stacked(arrays: tuple[Any, ...]) -> Tensor | None:
    return None if arrays[0] is None else torch.from_numpy(np.stack(arrays))


def _check(how: _Arithmetic, x: Tensor, ids: Tensor, weights: Tensor, base: Base) -> None:
    hidden, inner = base.down.shape[1:]
    function, rounding, group, parts = how.activation.function, *how[1:]
    if rounding not in ROUNDINGS:
        raise UsageError(f"rounding {rounding!r} is none of {', '.join(ROUNDINGS)}")
    if rounding == "group" and (group < 1 or hidden % group or inner % (group * parts)):
        raise UsageError(f"groups of {group} columns do not divide rows of {hidden} and {inner}")
    if parts < 1 or inner % parts:
        raise UsageError(f"{inner} columns cannot be cut into {parts} parts")
    if function not in GATE_FUNCTIONS or how.activation.gated != (base.gate is not None):
        raise UsageError(f"the weights are not those of experts with {function}")
    if x.ndim != 2 or ids.ndim != 2 or x.shape != (len(ids), hidden) or ids.shape != weights.shape:
        raise UsageError(
            f"x must be [T, {hidden}], ids and weights [T, K]; got {list(x.shape)}, "
            f"{list(ids.shape)} and {list(weights.shape)}"
        )
