"""Masks of the experts that are on the GPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ktconv.compat.kt.inputs import expect_values
from ktconv.errors import UsageError
from ktconv.system.numbers import whole
from ktconv.targets.hot import hot_experts


def generate_gpu_experts_masks(activation_freq: Tensor, num_gpu_experts: int) -> Tensor:
    """bool [L, E] on the CPU: True for the `num_gpu_experts` most used experts of all layers.

    `activation_freq` [L, E] says how often each was chosen, in any unit that is not negative. The
    number is cut to 0 to L * E; of equally used experts the lower layer and id come first.
    UsageError for anything else.
    """
    expect_values("activation_freq", activation_freq)
    used = activation_freq.detach().to("cpu", torch.float64).numpy()
    budget = max(0, whole("num_gpu_experts", num_gpu_experts, least=-sys.maxsize))
    return torch.from_numpy(hot_experts(used, budget))


def gpu_mask(mask: Any, experts: int) -> Tensor:
    """bool [E] of its own on the CPU: a copy of `mask`, None for no expert. UsageError unless it
    has a number for each expert."""
    if mask is None:
        return torch.zeros(experts, dtype=torch.bool, device="cpu")
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(f"gpu_experts_mask must be a bool tensor [{experts}] or None, not {kind}")
    if tuple(mask.shape) != (experts,):
        raise UsageError(
            f"gpu_experts_mask must have the shape [{experts}], one for each expert, not "
            f"{list(mask.shape)}"
        )
    expect_values("gpu_experts_mask", mask)
    return mask.detach().to("cpu", torch.bool, copy=True)
