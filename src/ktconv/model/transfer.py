"""Tensors of any device on the CPU, and results back: the only code that knows of two devices."""

from __future__ import annotations

import torch
from torch import Tensor


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    """The same values on the CPU, where they can be read at once.

    From CUDA they go through pinned memory. All copies are queued before one of them is waited for.
    """
    found = [_fetched(one) for one in tensors]
    for device in {one.device for one in tensors if one.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return found


def on_device(values: Tensor, like: Tensor) -> Tensor:
    """`values` of the CPU on the device and in the dtype of `like`. To CUDA the copy is queued on
    the current stream, as what follows is."""
    if like.is_cuda and not values.is_cuda:
        values = _pinned(values).copy_(values).to(like.device, non_blocking=True)
    return values.to(like)


def _fetched(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu")
    return _pinned(tensor).copy_(tensor, non_blocking=True)


def _pinned(tensor: Tensor) -> Tensor:
    """Memory for its values that the GPU reads and writes itself. PyTorch keeps it until the copies
    that were queued are done."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
