"""Tokens for a layer, by expert as kernels want them, and activations as engines round them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SEED = 47
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Routed:
    """Tokens and where they go: x [M, H], ids and weights [M, K]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def routed(tokens: int, hidden: int, experts: int, chosen: int) -> Routed:
    """Normal activations in bf16, each token to `chosen` experts at random."""
    random = torch.Generator().manual_seed(_SEED + tokens)
    x = torch.randn(tokens, hidden, generator=random).bfloat16()
    scores = torch.rand(tokens, experts, generator=random)
    values, ids = scores.topk(chosen)
    return Routed(x, ids.int().contiguous(), values.softmax(-1).contiguous())


def sorted_tokens(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places t * K + k by expert, those of each filled up to whole blocks with M * K; the expert of
    each block; how many places there are with those that fill up."""
    flat, places, owners = ids.flatten(), [], []
    for expert in range(experts):
        own = (flat == expert).nonzero().flatten()
        blocks = -(-len(own) // block)
        places.append(nn.functional.pad(own, (0, blocks * block - len(own)), value=len(flat)))
        owners += [expert] * blocks
    found = torch.cat(places).int()
    counts = torch.tensor([len(found)], dtype=torch.int32)
    return found, torch.tensor(owners, dtype=torch.int32), counts


def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes and float32 scales [M, 1]."""
    scale = x.float().abs().amax(-1, keepdim=True) / _E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def per_group(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """E4M3 codes and float32 scales [M, K / group]."""
    parts = x.float().unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True) / _E4M3_MAX
    return (parts / scale).flatten(1).to(torch.float8_e4m3fn), scale.squeeze(-1)


def per_power(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes and E8M0 scales [M, K / 32], rounded up, so that no code is cut off."""
    parts = x.float().unflatten(-1, (-1, 32))
    exponent = (parts.abs().amax(-1, keepdim=True) / _E4M3_MAX).log2().ceil()
    codes = parts / exponent.exp2()
    return codes.flatten(1).to(torch.float8_e4m3fn), (exponent + 127).squeeze(-1).to(torch.uint8)


ROUNDERS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "FP8_DYNAMIC": per_token,
    "FP8_BLOCK": per_group,
    "MXFP8": per_power,
}


def as_given(scheme: str, x: Tensor) -> Tensor:
    """The activations that a kernel gets, in float32."""
    if scheme not in ROUNDERS:
        return x.float()
    codes, scale = ROUNDERS[scheme](x)
    if scheme == "MXFP8":
        scale = (scale.float() - 127).exp2()
    return (codes.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(1)
