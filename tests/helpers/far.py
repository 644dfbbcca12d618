"""A GPU for machines that have none: tensors that say they are on cuda:0, and are as strict.

What mixes them with tensors of the CPU raises, and a copy to the CPU that does not block has its
values only when the stream has been waited for, as on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

FAR = torch.device("cuda", 0)


class FarTensor(Tensor):
    """Its values are those of `near`, which is on the CPU."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), dtype=near.dtype
        )
        made.near = near.detach()
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return FAR

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators: their arguments must all be far, but for single numbers."""
        if any(map(_is_near, tree_leaves((args, kwargs)))):
            raise RuntimeError(f"{func} got tensors on two devices")
        found = func(*tree_map(_near, args), **tree_map(_near, kwargs or {}))
        if func._schema.is_mutable:  # in place
            return args[0]
        return tree_map(lambda one: FarTensor(one) if isinstance(one, Tensor) else one, found)


class _FarDevice(TorchFunctionMode):
    """Makes tensors on FAR, and queues copies from there."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Callable[[], object]] = []
        self._started = 0  # copies that are done
        self._own: list[Tensor] = []  # pinned memory
        self.pinned = 0  # how often pinned memory was asked for
        self.waits = 0
        self.capturing = False

    def synchronize(self) -> None:
        """As of the current stream."""
        self.run_until(self.queued)

    @property
    def queued(self) -> int:
        """Copies that were asked for."""
        return self._started + len(self._queue)

    def run_until(self, count: int) -> None:
        """Waits for the first `count` copies of all."""
        self.waits += 1
        while self._started < count:
            self._queue.pop(0)()
            self._started += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            self.pinned += 1
            self._own.append(func(*args, **kwargs))
            return self._own[-1]
        if func is Tensor.is_pinned:
            return any(args[0].data_ptr() == one.data_ptr() for one in self._own)
        if func is Tensor.to:
            return self._moved(*args, **kwargs)
        if func is Tensor.backward:
            return self._backward(args[0], kwargs["gradient"])
        far = [isinstance(one, FarTensor) for one in args[:2]]
        if func is Tensor.copy_ and far[0] != far[1]:
            return self._copied(*args, **kwargs)
        if func is Tensor.tolist and far[0]:
            return args[0].near.tolist()  # which blocks
        if func is torch.nn.functional.one_hot and far[0]:
            return FarTensor(func(args[0].near, *args[1:], **kwargs))  # makes tensors inside
        if _is_far(kwargs.get("device")):
            return FarTensor(_near(func(*args, **{**kwargs, "device": "cpu"})))
        return func(*args, **kwargs)

    def _backward(self, tensor: Tensor, gradient: Tensor) -> None:
        """While it runs, too, tensors can be far."""
        run = torch.autograd.Variable._execution_engine.run_backward
        with self:
            run((tensor,), (gradient,), False, False, (), accumulate_grad=True)

    def _moved(self, tensor: Tensor, *places: Any, **named: Any) -> Tensor:
        """tensor.to of a device, a dtype, both, or as another tensor has them."""
        device, dtype = tensor.device, tensor.dtype
        for one in (*places, named.get("device"), named.get("dtype")):
            if isinstance(one, Tensor):
                device, dtype = one.device, one.dtype
            elif isinstance(one, torch.dtype):
                dtype = one
            elif isinstance(one, (str, torch.device)):
                device = torch.device(one)
        near = _near(tensor)
        if not _is_far(device):
            near = near.to(device=device, dtype=dtype)
            if not isinstance(tensor, FarTensor):
                return near
            blocking = not named.get("non_blocking")
            return self._copied(torch.empty_like(near), FarTensor(near), not blocking)
        same = isinstance(tensor, FarTensor) and tensor.dtype == dtype
        return tensor if same else FarTensor(near.detach().to(dtype, copy=True))

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        values = _near(source).clone()
        self._queue.append(lambda: _near(target).copy_(values))
        if non_blocking and not isinstance(target, FarTensor):
            target.fill_(-1)  # what is read too early is wrong
        else:
            self.synchronize()
            self.waits -= 1
        return target


class _FarEvent:
    """torch.cuda.Event, of the one stream that there is."""

    def record(self, stream: _FarDevice) -> None:
        self._stream, self._until = stream, stream.queued

    def synchronize(self) -> None:
        self._stream.run_until(self._until)


def _is_near(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FarTensor) and value.ndim > 0


def _is_far(device: object) -> bool:
    """Of a device as people write it."""
    return isinstance(device, (str, torch.device)) and torch.device(device).type == FAR.type


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


@contextmanager
def far_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[_FarDevice]:
    """Meanwhile tensors can be on cuda:0."""
    device = _FarDevice()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device)
    monkeypatch.setattr(torch.cuda, "Event", _FarEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    # Module.to makes new parameters then, as for devices whose tensors are of another kind.
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: False)
    with device:
        yield device
