"""The tensors of one call, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ktconv.errors import UsageError
from ktconv.system.units import counted

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # that the kernels read
_INTEGERS = (torch.int32, torch.int64)


class Inputs(NamedTuple):
    """x [T, H], ids and weights [T, K], of dtypes that the kernels read, on any devices. `like` is
    x as the caller has it, to whose shape, dtype and device the result goes."""

    like: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def tokens(self) -> int:
        """T"""
        return self.x.shape[0]

    @property
    def on_cpu(self) -> bool:
        """Whether the kernels can read all of them where they are."""
        return self.x.is_cpu and self.ids.is_cpu and self.weights.is_cpu


def checked(hidden: int, top_k: int, x: Any, ids: Any, weights: Any) -> Inputs:
    """UsageError names the tensor that does not fit a layer of this hidden size and top-k.

    x [..., hidden]; ids and weights have top_k numbers for each of its tokens, in any shape that
    ends so.
    """
    for name, tensor in (("hidden_states", x), ("topk_ids", ids), ("topk_weights", weights)):
        _check_tensor(name, tensor)
    if not x.shape or x.shape[-1] != hidden:
        raise UsageError(f"hidden_states must have the shape [..., {hidden}], not {list(x.shape)}")
    if not x.is_floating_point() or not weights.is_floating_point():
        raise UsageError(
            "hidden_states and topk_weights must be floating point, not "
            f"{_name(x)} and {_name(weights)}"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(f"topk_ids must be integers, not {_name(ids)}")
    rows = x if x.ndim == 2 else x.reshape(-1, hidden)
    return Inputs(
        x,
        rows if x.dtype in _FLOATS else rows.float(),
        _for_each("topk_ids", ids if ids.dtype in _INTEGERS else ids.long(), len(rows), top_k),
        _for_each("topk_weights", weights.float(), len(rows), top_k),
    )


def expect_values(name: str, tensor: Any) -> None:
    """UsageError for anything but a tensor whose values can be read."""
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{name} must be a tensor, not a {type(tensor).__name__}")
    if tensor.is_meta:
        raise UsageError(f"{name} is on the device meta, so it has no values")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{name} has the layout {tensor.layout}", "give a dense tensor")


def _check_tensor(name: str, tensor: Any) -> None:
    expect_values(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{name} needs a gradient, which packed experts do not have",
            "call under torch.no_grad()",
        )


def _for_each(name: str, tensor: Tensor, tokens: int, top_k: int) -> Tensor:
    """[tokens, top_k]"""
    if tensor.shape == (tokens, top_k):
        return tensor
    if tensor.ndim < 1 or tensor.shape[-1] != top_k or tensor.numel() != tokens * top_k:
        raise UsageError(
            f"{name} must have {top_k} numbers for each of the {counted(tokens, 'token')}, not "
            "the shape "
            f"{list(tensor.shape)}"
        )
    return tensor.reshape(tokens, top_k)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
