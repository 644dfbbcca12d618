"""Activations of other devices, and their gradients, to and from the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktconv.errors import UsageError
from ktconv.runtime.staging import delivered, on_cpu


def fetched(
    x: Tensor, ids: Tensor, weights: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Copy arguments to the CPU; gradients go back to where each came from."""
    named = {"x": x, "ids": ids, "weights": weights}
    named |= {} if skip is None else {"skip": skip}
    for name, one in named.items():
        if not isinstance(one, Tensor):
            raise UsageError(f"{name} must be a tensor of torch, not {type(one).__name__}")
    inputs = list(named.values())
    if any(one.is_meta for one in inputs):
        raise UsageError(
            "packed experts got an input on meta, which has no values",
            "load the other parts of the model, or move them to a device that computes",
        )
    far = [one for one in inputs if not one.is_cpu]
    near = iter(_Fetched.apply(*far) if far else ())  # type: ignore[no-untyped-call]
    x, ids, weights, *rest = (one if one.is_cpu else next(near) for one in inputs)
    return x, ids, weights, rest[0] if rest else None


def returned(y: Tensor, device: torch.device) -> Tensor:
    """y on `device`; its gradient comes back to the CPU."""
    if device.type == "cpu":
        return y
    found: Tensor = _Returned.apply(y, device)  # type: ignore[no-untyped-call]
    return found


class _Fetched(torch.autograd.Function):
    """Copies on the CPU."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices = [one.device for one in tensors]
        ctx.set_materialize_grads(False)
        return tuple(on_cpu(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = zip(gradients, ctx.devices, strict=True)
        return tuple(None if one is None else delivered(one, device) for one, device in given)


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, device: torch.device) -> Tensor:
        return delivered(y, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return on_cpu(dy)[0], None
