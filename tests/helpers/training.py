"""Layers with LoRA, and all their gradients beside those of the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ktconv.formats import FORMATS
from ktconv.formats.decode import round_to_bf16
from ktconv.native import Activation
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.layers import Experts, pack_experts
from ktconv.system.arrays import F32
from ktconv.train import LoRAExperts
from ktconv.train.reference import Base, Lora, as_kernels, reference, relative

MATRICES = Lora._fields[:6]
BOUND = 0.006  # of every gradient's relative error


class Batch(NamedTuple):
    """x and dy [T, H], ids and weights [T, K]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor


@cache  # the same experts in many tests
def _matrices(index: int, inner: int, hidden: int) -> tuple[F32, ...]:
    rng = np.random.default_rng([7, index])
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    return tuple(_scaled(rng.standard_normal(s, np.float32), s[1] ** -0.5) for s in shapes)


def packed(
    method: str,
    hidden: int = 256,
    inner: int = 256,
    origins: Sequence[int | None] = range(4),
    *,
    parts: int = 1,
    activation: Activation | None = None,
    scale: float = 1.0,
) -> Experts:
    """Random experts; slot s has those of `origins[s]`, None is not here."""
    gated = activation is None or activation.gated

    def matrices(index: int) -> Any:
        gate, up, down = _matrices(index, inner, hidden)
        return (gate * np.float32(scale) if gated else None), up, down

    more: Any = {"parts": parts, "activation": activation}
    return pack_experts(FORMATS[method], matrices, origins, hidden, inner, **more)


def lora_experts(
    layer: MoELayer | Experts,
    rank: int | None = 8,
    alpha: float | None = None,
    *,
    pool: Pool | None = None,
    **more: Any,
) -> Any:
    """With a B that is not 0, else most gradients would be; values are those of bf16."""
    if isinstance(layer, Experts):
        layer = MoELayer(layer, pool)
    made = LoRAExperts(layer, rank, alpha, **more)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((values * parameter.shape[-1] ** -0.5).bfloat16())
    return made


def batch(
    layer: MoELayer | LoRAExperts,
    tokens: int = 13,
    top_k: int = 2,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Batch:
    """Random tokens, ids different within a token where there are so many experts."""
    layer = layer.layer if isinstance(layer, LoRAExperts) else layer
    generator = torch.Generator().manual_seed(seed)
    x, dy = (
        torch.randn(tokens, layer.hidden, generator=generator).bfloat16().to(dtype) for _ in "xd"
    )
    order = torch.rand(tokens, max(layer.experts, top_k), generator=generator).argsort(dim=1)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return Batch(x, order[:, :top_k] % layer.experts, weights, dy)


def gradients(module: LoRAExperts, given: Batch, skip: Tensor | None = None) -> dict[str, Tensor]:
    """y, and the gradients by name: x, weights, and the parameters'."""
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = module(x, given.ids, weights, skip=skip)
    y.backward(given.dy.to(y.dtype))
    return {"y": y.detach()} | _named(x, weights, dict(module.named_parameters()))


def called(module: LoRAExperts, given: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """x and weights, which need gradients, and y of them."""
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()
    return x, weights, module(x, given.ids, weights)


def expected(
    module: LoRAExperts,
    given: Batch,
    skip: Tensor | None = None,
    dropped: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The same by autograd on the dequantized weights, in float64."""
    x, weights = (one.double().requires_grad_() for one in (given.x, given.weights))
    there = {
        name: one.detach().double().requires_grad_() for name, one in module.named_parameters()
    }
    ids = given.ids
    if skip is not None:
        real = (ids >= 0) & (ids < module.layer.experts)
        ids = torch.where(real & ~skip[torch.where(real, ids, 0)], ids, -1)
    lora = Lora(**there, scale=module.scale)
    how = as_kernels(module.layer, trained=bool(there))
    y = reference(x, ids, weights, double(Base.of(module.layer)), lora, **how, dropped=dropped)
    y.backward(given.dy.double())
    return {"y": y.detach()} | _named(x, weights, there)


def errors(
    module: LoRAExperts,
    given: Batch,
    skip: Tensor | None = None,
    dropped: tuple[Tensor, Tensor] | None = None,
) -> dict[str, float]:
    """The relative error of y and of each gradient."""
    found, truth = gradients(module, given, skip), expected(module, given, skip, dropped)
    assert found.keys() == truth.keys()
    return {name: relative(found[name], truth[name]) for name in truth}


def check(module: LoRAExperts, given: Batch, **more: Any) -> dict[str, float]:
    """`errors`, which must be within BOUND."""
    found = errors(module, given, **more)
    assert all(error <= BOUND for error in found.values()), found  # which NaN is not
    return found


def double(base: Base) -> Base:
    return Base._make(None if one is None else one.double() for one in base)


def same(found: dict[str, Tensor], other: dict[str, Tensor], but: Iterable[str] = ()) -> bool:
    """Whether all bits are the same."""
    assert found.keys() == other.keys()
    return all(torch.equal(found[name], other[name]) for name in found.keys() - set(but))


def _scaled(values: F32, factor: float) -> F32:
    return round_to_bf16(values * np.float32(factor))


def _named(x: Tensor, weights: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Any] = {"x": x, "weights": weights, **parameters}
    return {name: one.grad for name, one in tensors.items()}


# ---- dropout: native/src/train/random.h in NumPy --------------------------------------------


def dropped_by(
    seed: int, chance: float, tokens: int, top_k: int, hidden: int, inner: int
) -> tuple[Tensor, Tensor]:
    """The factors 0 or 1 / (1 - chance) of x [T, K, H] and of the middle [T, K, I], float64."""
    below = math.ceil(float(np.float32(chance)) * 2**32)
    keep = 1 / float(np.float32(1) - np.float32(chance))

    def factors(kind: int, columns: int) -> Tensor:
        rows = np.arange(tokens * top_k, dtype=np.uint64) * np.uint64(2) + np.uint64(kind)
        keys = _mixed(_mixed(np.uint64(seed)) ^ rows)
        bits = _bits(keys[:, None], np.arange(columns, dtype=np.uint32))
        found = torch.from_numpy(np.where(bits < below, 0.0, keep))
        return found.reshape(tokens, top_k, columns)

    return factors(0, hidden), factors(1, inner)


def _mixed(x: Any) -> Any:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _bits(keys: Any, columns: Any) -> Any:
    first = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    second = (keys >> np.uint64(32)).astype(np.uint32)
    x = columns + first
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    x = (x ^ (x >> np.uint32(11))) + second
    x = x * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))
