"""Result and gradients of a call of experts with LoRA by the reference, an expert at a time, and
how far others are from them: for `bench --mode sft` and `verify --gradients`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from ktconv.runtime.layers import Experts
from ktconv.runtime.layers.experts import OutputNorm
from ktconv.source.reading.streamed import Streams
from ktconv.system.arrays import Array
from ktconv.train.reference import (
    Base,
    KernelRounding,
    Lora,
    as_kernels,
    reference,
    relative,
)

MATRICES = Lora._fields[:6]
NAMES = ("y", "dx", "dw", *MATRICES)  # y, and the gradients of x, of weights and of MATRICES
_ALPHA_OVER_RANK = 2.0
_B_DEVIATION = 0.1  # of random B, so that LoRA's part of the result is of the size of the base's

# Of errors relative in the 2-norm. Rounding to bf16 has one of at most 2^-8 / sqrt(3) = 0.0023, by
# where in its binade a number is; results go through one to four of them: 0.002 to 0.0045.
BOUND = 0.006
BOUND_OF_DX = 0.005  # it is summed in fp32 and rounded once
# Of fewer pairs of token and expert one unlucky element counts in norms: bounds are doubled.
_FEW_PAIRS = 64


class Call(NamedTuple):
    """A call and the gradient of its result."""

    x: Tensor  # bf16 [T, H]
    ids: Tensor  # int64 [T, K], below 0: skipped
    weights: Tensor  # fp32 [T, K]
    dy: Tensor  # bf16 [T, H]
    lora: Lora  # of E experts, bf16


Found = dict[str, Tensor]  # by NAMES, without those of matrices that are not there


class Expected(NamedTuple):
    """Findings of the reference. Errors are relative to norms; the one of dw, whose elements are
    products dy * o, is by chance near 0 where there are few: then `dw_norm` counts, the root of the
    sum of |dy|^2 |o|^2 / H, which is its size for a random dy."""

    found: Found
    dw_norm: float


def random_lora(
    experts: int, hidden: int, intermediate: int, rank: int, generator: Generator, gated: bool
) -> Lora:
    """bf16 matrices: A as they are when training begins, uniform within 1 / sqrt(columns), B
    normal, as zeros would hide the gradients of A."""

    def a(columns: int) -> Tensor:
        drawn = torch.rand(experts, rank, columns, generator=generator)
        return ((2 * drawn - 1) / sqrt(columns)).bfloat16()

    def b(rows: int) -> Tensor:
        return (_B_DEVIATION * torch.randn(experts, rows, rank, generator=generator)).bfloat16()

    return Lora(
        gate_a=a(hidden) if gated else None,
        gate_b=b(intermediate) if gated else None,
        up_a=a(hidden),
        up_b=b(intermediate),
        down_a=a(intermediate),
        down_b=b(hidden),
        scale=_ALPHA_OVER_RANK,
    )


def matrices_of(lora: Lora) -> dict[str, Tensor]:
    """Matrices that are there, by their names."""
    each = zip(MATRICES, lora[:6], strict=True)
    return {name: matrix for name, matrix in each if isinstance(matrix, Tensor)}


def from_bits(bits: Array) -> Tensor:
    """A tensor of bf16 on the memory of its bits."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def base_of(expert: Streams) -> Base:
    """One expert's matrices as those of a layer of one."""
    matrices = [None if one is None else torch.from_numpy(one.values())[None] for one in expert]
    biases = [
        None if one is None or one.bias is None else torch.from_numpy(one.bias)[None]
        for one in expert
    ]
    return Base._make([*matrices, *biases])


def rounding_of(packed: Experts) -> KernelRounding:
    """Rounding of `expected` for these experts: activations as the kernels do; nothing where
    weights are bf16, and all of the error is that of the kernels."""
    how = as_kernels(packed, trained=True)
    return {**how, "rounding": "none"} if packed.format.code == "bf16" else how


def expected(
    call: Call,
    base: Callable[[int], Base],
    how: KernelRounding,
    norm: OutputNorm | None = None,
) -> Expected:
    """fp32 results of autograd. `base(e)` are the weights of expert e, in memory one at a time;
    `norm` is that of experts' outputs."""
    x, weights = call.x.float(), call.weights.float()
    found = {"y": torch.zeros_like(x), "dx": torch.zeros_like(x), "dw": torch.zeros_like(weights)}
    lora = matrices_of(call.lora)
    found |= {name: torch.zeros(matrix.shape) for name, matrix in lora.items()}
    squares = 0.0
    for expert in torch.unique(call.ids[call.ids >= 0]).tolist():
        token, slot = torch.where(call.ids == expert)
        own = {name: _leaf(matrix[expert : expert + 1]) for name, matrix in lora.items()}
        own_x, own_weights = _leaf(x[token]), _leaf(weights[token, slot])
        alone = torch.zeros(len(token), 1, dtype=torch.int64), torch.ones(len(token), 1)
        scale = call.lora.scale
        outputs = reference(own_x, *alone, base(expert), Lora(**own, scale=scale), **how)
        outputs = outputs if norm is None else _normed(outputs, norm)
        y, dy = own_weights[:, None] * outputs, call.dy[token].float()
        torch.autograd.backward(y, dy)
        squares += float((_squares(dy) * _squares(outputs.detach())).sum()) / x.shape[1]
        found["y"].index_add_(0, token, y.detach())
        found["dx"].index_add_(0, token, _gradient(own_x))
        found["dw"][token, slot] = _gradient(own_weights)
        for name, matrix in own.items():
            found[name][expert] = _gradient(matrix)[0]
    return Expected(found, sqrt(squares))


def _squares(rows: Tensor) -> Tensor:
    """The squared norm of each."""
    return rows.double().square().sum(dim=1)


def _normed(outputs: Tensor, norm: OutputNorm) -> Tensor:
    """[M, H] of [M, H]; see OutputNorm."""
    scaled = outputs * (1 + torch.from_numpy(norm.weight))
    mean = scaled.square().mean(dim=1, keepdim=True)
    return scaled / (mean + norm.epsilon).sqrt()


def _leaf(values: Tensor) -> Tensor:
    return values.detach().float().clone().requires_grad_()


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def errors(found: Mapping[str, Tensor], right: Expected) -> dict[str, float]:
    """The relative error of each."""
    each = {name: relative(found[name], one) for name, one in right.found.items()}
    norm = float(right.found["dw"].double().norm())
    return each | {"dw": each["dw"] * (norm or 1.0) / max(norm, right.dw_norm, 1e-30)}


def bounds(call: Call) -> dict[str, float]:
    """The largest errors that are right, by NAMES."""
    found = dict.fromkeys(NAMES, BOUND) | {"dx": BOUND_OF_DX}
    few = int((call.ids >= 0).sum()) < _FEW_PAIRS
    return {name: 2 * bound if few else bound for name, bound in found.items()}
