"""Tensors of any device on the CPU, and results back: the only code that knows of two devices.

Copies from and to CUDA go through pinned memory, on the stream that is current where they are asked
for. Only who reads values on the CPU waits for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ktconv.errors import UsageError


class Fetched:
    """Tensors on the CPU that a device may still be writing to."""

    def __init__(self, tensors: Sequence[Tensor], events: Sequence[torch.cuda.Event]) -> None:
        self._tensors, self._events = tensors, events

    def wait(self) -> list[Tensor]:
        """The tensors, once they have their values. Any thread may wait, any number of times."""
        for event in self._events:
            event.synchronize()
        return list(self._tensors)


def fetch(*tensors: Tensor, copy: bool = False) -> Fetched:
    """The values of `tensors` on the CPU, without gradients. All copies are queued when it returns.

    `copy`: tensors of the CPU are copied too, so that the caller may change his at once; those of
    CUDA he may change by work that he queues on the same stream. UsageError while a CUDA graph is
    being captured.
    """
    devices = list(dict.fromkeys(one.device for one in tensors if one.is_cuda))
    for device in devices:
        _refuse_capture(device)
    found = [_fetched(one.detach() if one.requires_grad else one, copy) for one in tensors]
    return Fetched(found, [_recorded(device) for device in devices])


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    """`fetch`, once the values are there."""
    return fetch(*tensors).wait()


def memory_for(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the CPU for values that go to `device`."""
    if device.type == "cuda":
        return pinned(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def on_device(values: Tensor, like: Tensor) -> Tensor:
    """`values` of the CPU on the device and in the dtype of `like`."""
    return delivered(values, like.device).to(like.dtype)


def delivered(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the CPU on `device`. To CUDA the copy is queued on the current stream, as what
    follows is; PyTorch keeps pinned memory until it is done."""
    if device.type == "cuda" and not values.is_cuda:
        if not values.is_pinned():
            values = pinned(values.shape, values.dtype).copy_(values)
        return values.to(device, non_blocking=True)
    return values.to(device)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory on the CPU that a GPU reads and writes by itself."""
    # Without a device it would be on the caller's default one.
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)


def tensor_at(address: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor of the CPU over memory that its owner must keep alive."""
    count = prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def _fetched(tensor: Tensor, copy: bool) -> Tensor:
    if tensor.is_cuda:
        return pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
    if tensor.device.type == "cpu":
        return tensor.clone() if copy else tensor
    return tensor.to("cpu")


def _recorded(device: torch.device) -> torch.cuda.Event:
    """An event that happens once all that is queued on the current stream of `device` is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _refuse_capture(device: torch.device) -> None:
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "experts on the CPU cannot be called while a CUDA graph is being captured: a graph "
                "would repeat the copies, but not the computation between them",
                "capture what is between the MoE layers, or turn CUDA graphs off",
            )
