"""A GPU for machines that have none: tensors that say they are on cuda:0, and are as strict.

What mixes them with tensors of the CPU raises. Copies that do not block and host functions are done
when the stream that has them is waited for, or computes, and no sooner; a stream waits for
another only after `wait_stream`. Host functions run on a thread of their own and may not call CUDA.
While a graph is captured nothing is done but recorded, what a graph cannot have raises, and results
are NaN; a replay does what was recorded with what memory has then.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ktconv.runtime import cuda
from ktconv.runtime.cuda import Cuda

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
        near = tree_map(_near, args), tree_map(_near, kwargs or {})
        if _FarDevice.active is not None:
            return _FarDevice.active.computed(func, args, near)
        return _far_result(func, args, func(*near[0], **near[1]))


def _far_result(func: Any, args: Any, found: Any) -> Any:
    if func._schema.is_mutable:  # in place
        return args[0]
    return tree_map(lambda one: FarTensor(one) if isinstance(one, Tensor) else one, found)


class FarGraph:
    """What a capture has recorded, and the user objects that it holds."""

    def __init__(self, number: int) -> None:
        self.number, self.nodes = number, list[Callable[[], object]]()
        self.objects: list[tuple[Any, int]] = []
        self.streams: list[FarStream] = []

    def replay(self, stream: FarStream) -> None:
        """Queues all of it."""
        stream.add(lambda: [node() for node in self.nodes])

    def destroy(self) -> None:
        """The end of the graph and of what was made of it."""
        for function, data in self.objects:
            _on_its_own_thread(function, data)
        self.nodes, self.objects = [], []


class FarStream:
    """torch.cuda.Stream; its handle is `cuda_stream`."""

    def __init__(self, device: _FarDevice, handle: int) -> None:
        self.cuda_stream, self._device = handle, device
        self._queue: list[Callable[[], object]] = []
        self._started = 0  # of what was queued
        self.graph: FarGraph | None = None  # that is capturing it

    @property
    def queued(self) -> int:
        """What it was given so far."""
        return self._started + len(self._queue)

    def add(self, work: Callable[[], object]) -> None:
        if self.graph is not None:
            self.graph.nodes.append(work)
        else:
            self._queue.append(work)

    def run_until(self, count: int) -> None:
        """Does the first `count` of all it was given."""
        while self._started < count:
            self._started += 1
            self._queue.pop(0)()

    def synchronize(self) -> None:
        self._device.refuse_capture()
        self._device.waits += 1
        self.run_until(self.queued)

    def wait_stream(self, other: FarStream) -> None:
        """A stream that waits for one that is captured takes part in the capture."""
        if other.graph is not None:
            self.graph = other.graph
            other.graph.streams.append(self)
        elif self.graph is None:
            until = other.queued
            self.add(lambda: other.run_until(until))


class _FarDevice(TorchFunctionMode):
    """Makes tensors on FAR, and queues copies from there."""

    active: _FarDevice | None = None

    def __init__(self) -> None:
        super().__init__()
        self._own: list[Tensor] = []  # pinned memory
        self.pinned = 0  # how often pinned memory was asked for
        self.waits = 0
        self.capturing = False
        self.driver = FarDriver(self)
        self._handles = count(0)
        self.streams: dict[int, FarStream] = {}
        self.current = self.new_stream()

    def synchronize(self) -> None:
        """As of the current stream."""
        self.current.synchronize()

    def new_stream(self) -> FarStream:
        made = FarStream(self, next(self._handles))
        self.streams[made.cuda_stream] = made
        return made

    @contextmanager
    def stream(self, stream: FarStream) -> Iterator[None]:
        """Meanwhile it is the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, stream: FarStream) -> Iterator[FarGraph]:
        """Records what is given to the stream, which is the current one meanwhile."""
        graph = FarGraph(next(_numbers))
        stream.graph, self.capturing = graph, True
        graph.streams.append(stream)
        try:
            with self.stream(stream):
                yield graph
        finally:
            self.capturing = False
            for one in graph.streams:
                one.graph = None

    def refuse_capture(self) -> None:
        """RuntimeError for what waits while any stream is captured."""
        if self.capturing and any(one.graph for one in self.streams.values()):
            raise RuntimeError("operation not permitted when stream is capturing")

    def computed(self, func: Any, args: Any, near: tuple[Any, Any]) -> Any:
        """What an operator gives, after all that the current stream has."""
        stream = self.current
        if stream.graph is None:
            stream.run_until(stream.queued)
            return _far_result(func, args, func(*near[0], **near[1]))
        found = func(*near[0], **near[1])
        mutable = func._schema.is_mutable

        def again() -> None:
            values = func(*near[0], **near[1])
            if not mutable:
                tree_map(_refill, found, values)

        stream.graph.nodes.append(again)
        inputs = {one.untyped_storage().data_ptr() for one in tree_leaves(near) if _is_tensor(one)}
        for one in tree_leaves(found):
            if _is_tensor(one) and not mutable and one.untyped_storage().data_ptr() not in inputs:
                _poison(one)
        return _far_result(func, args, found)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the CPU begins in pinned memory."""
        at = tensor.data_ptr()
        own = [(one.data_ptr(), one.nbytes) for one in self._own]
        return any(start <= at < start + size for start, size in (*own, *self.driver.ranges()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            if self.capturing and self.driver.mode.value != _RELAXED:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.pinned += 1
            self._own.append(func(*args, **kwargs))
            return self._own[-1]
        if func is Tensor.is_pinned:
            return self.is_pinned(args[0])
        if func is Tensor.to:
            return self._moved(*args, **kwargs)
        if func is Tensor.backward:
            return self._backward(args[0], kwargs["gradient"])
        far = [isinstance(one, FarTensor) for one in args[:2]]
        if func is Tensor.copy_ and far[0] != far[1]:
            return self._copied(*args, **kwargs)
        if func is Tensor.tolist and far[0]:
            self.current.synchronize()
            return args[0].near.tolist()
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
        if isinstance(tensor, FarTensor):
            return tensor if tensor.dtype == dtype else Tensor.to(tensor, dtype)
        if named.get("non_blocking") and tensor.dtype == dtype:
            return self._copied(FarTensor(_poison(near.detach().clone())), tensor, True)
        return FarTensor(near.detach().to(dtype, copy=True))

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        host = target if isinstance(source, FarTensor) else source
        pinned = self.is_pinned(host)
        if self.current.graph is not None and not (pinned and non_blocking):
            raise RuntimeError("a graph cannot have a copy that blocks or is of pageable memory")
        values = _near(source)
        if not isinstance(source, FarTensor) and not pinned:
            values = values.clone()  # CUDA stages it
        self.current.add(lambda: _near(target).copy_(values))
        if not non_blocking:
            self.current.run_until(self.current.queued)
        elif not isinstance(target, FarTensor):
            _poison(target)  # what is read too early is wrong
        return target


_RELAXED = 2
_numbers = count(1)  # of captures in this process
_NOT_PERMITTED, _INVALID = 900, 1


class FarDriver:
    """libcuda, as far as `ktconv.runtime.cuda` calls it."""

    def __init__(self, device: _FarDevice) -> None:
        self._device, self._memory = device, dict[int, Any]()
        self.mode = ctypes.c_int(0)
        self._objects: dict[int, tuple[Any, int]] = {}
        self.launched = 0

    def ranges(self) -> list[tuple[int, int]]:
        return [(at, ctypes.sizeof(memory)) for at, memory in self._memory.items()]

    def _refused(self) -> int:
        """The status of a call from a host function, or that a capture does not allow."""
        if threading.current_thread().name == _HOST:
            return _NOT_PERMITTED
        return _NOT_PERMITTED if self._device.capturing and self.mode.value != _RELAXED else 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"operation not permitted"
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        own = self.mode.value
        self.mode.value, mode._obj.value = mode._obj.value, own
        return 0

    def cuMemHostAlloc(self, address: Any, nbytes: int, flags: int) -> int:
        if status := self._refused():
            return status
        memory = (ctypes.c_ubyte * nbytes)(*[255] * min(nbytes, 64))
        address._obj.value = ctypes.addressof(memory)
        self._memory[address._obj.value] = memory
        return 0

    def cuMemFreeHost(self, address: Any) -> int:
        if status := self._refused():
            return status
        return 0 if self._memory.pop(address.value, None) else _INVALID

    def cuLaunchHostFunc(self, stream: Any, function: Any, data: Any) -> int:
        if threading.current_thread().name == _HOST:
            return _NOT_PERMITTED
        self.launched += 1
        where = self._device.streams[stream.value or 0]
        where.add(lambda: _on_its_own_thread(function, data))
        return 0

    def cuStreamGetCaptureInfo_v2(
        self, stream: Any, status: Any, number: Any, graph: Any, *_: Any
    ) -> int:
        found = self._device.streams[stream.value or 0].graph
        status._obj.value = found is not None
        number._obj.value = graph._obj.value = found.number if found else 0
        return 0

    def cuUserObjectCreate(
        self, made: Any, data: Any, function: Any, references: int, flags: int
    ) -> int:
        made._obj.value = len(self._objects) + 1
        self._objects[made._obj.value] = function, data
        return 0

    def cuGraphRetainUserObject(self, graph: Any, made: Any, references: int, flags: int) -> int:
        (found,) = {
            one.graph
            for one in self._device.streams.values()
            if one.graph and one.graph.number == graph.value
        }
        found.objects.append(self._objects.pop(made.value))
        return 0


_HOST = "a thread of the driver"


def _on_its_own_thread(function: Any, data: Any) -> None:
    """Calls a host function."""
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)
    thread = threading.Thread(target=call, args=(data.value,), name=_HOST, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a host function does not return"


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _refill(old: Any, new: Any) -> None:
    if _is_tensor(old):
        old.copy_(new)


def _poison(tensor: Tensor) -> Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class _FarEvent:
    """torch.cuda.Event."""

    def record(self, stream: FarStream) -> None:
        self._stream, self._until = stream, stream.queued

    def synchronize(self) -> None:
        self._stream._device.refuse_capture()
        self._stream._device.waits += 1
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
    monkeypatch.setattr(cuda, "driver", lambda: Cuda(device.driver))
    monkeypatch.setattr(torch.cuda, "Event", _FarEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    # Module.to makes new parameters then, as for devices whose tensors are of another kind.
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: False)
    monkeypatch.setattr(_FarDevice, "active", device)
    with device:
        yield device
