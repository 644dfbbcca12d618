"""Calls that a CUDA stream makes by itself, so that a graph which captured them repeats them.

A call puts on the stream: copies of its inputs into pinned memory, a host function that lets the
pool's queue compute them, one that waits until it has, and a copy of the result. Nobody waits on
the CPU but the driver's own thread, and no host function needs the interpreter.

Calls outside of graphs have pinned memory of PyTorch's, calls of a graph that of the graph: layers
of one graph that are called one after the other share it, since what a stream repeats stays in
order. A graph keeps its layers, too, until the driver tells that it is gone.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from ktconv import native
from ktconv.compat.kt.calls import Deferred, Running, Share, as_input, start
from ktconv.compat.kt.inputs import Inputs
from ktconv.errors import ResourceError, UsageError
from ktconv.runtime import MoELayer, cuda
from ktconv.runtime.staging import pinned, tensor_at
from ktconv.system.pool import Pool


class Staging(Struct, frozen=True):
    """Pinned memory of a call; `owner` is what keeps it."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor
    owner: object = None


class Graph:
    """A captured graph, with everything it needs as long as it may be replayed."""

    def __init__(self, driver: cuda.Cuda, capture: cuda.Capture) -> None:
        self.number, self._driver, self._gone = capture.number, driver, native.Flag()
        self._idle: dict[object, list[Staging]] = defaultdict(list)
        self.kept: list[object] = []
        driver.tell_end(capture.graph, native.RAISE, self._gone.address)

    @property
    def is_gone(self) -> bool:
        """Whether nothing will replay it any more."""
        return self._gone.raised

    def take(self, stream: int, inputs: Inputs) -> Staging:
        """Memory for a call on a stream: that of an earlier one which has been synchronized there,
        or new."""
        idle = self._idle[_key(stream, inputs[1:])]
        if idle:
            return idle.pop()
        shapes = [(one.dtype, one.shape) for one in (*inputs[1:], inputs.x)]
        sizes = [-(-dtype.itemsize * shape.numel() // 64) * 64 for dtype, shape in shapes]
        memory = cuda.Memory(self._driver, sum(sizes))
        at = [memory.address + sum(sizes[:n]) for n in range(len(sizes))]
        x, ids, weights, y = (tensor_at(place, *one) for place, one in zip(at, shapes, strict=True))
        self.kept.append(memory)
        return Staging(x, ids, weights, y, memory)

    def give(self, stream: int, staging: Staging) -> None:
        """The end of what reads it: what the stream does next comes after that."""
        key = _key(stream, (staging.x, staging.ids, staging.weights))
        self._idle[key].append(staging)


def _key(stream: int, given: Sequence[Tensor]) -> object:
    return stream, *((one.dtype, one.shape) for one in given)


_graphs: dict[int, Graph] = {}
native.immortal(_graphs)  # replays and the ends of graphs may come after the interpreter's
_lock = threading.Lock()


def forget_graphs() -> None:
    """Frees what graphs needed that are gone."""
    with _lock:
        for number in [n for n, graph in _graphs.items() if graph.is_gone]:
            del _graphs[number]


def _graph_of(driver: cuda.Cuda, stream: int) -> Graph | None:
    """The graph that the stream is capturing."""
    capture = driver.capture(stream)
    if capture is None:
        return None
    forget_graphs()
    with _lock:
        if capture.number not in _graphs:
            _graphs[capture.number] = Graph(driver, capture)
        return _graphs[capture.number]


class StreamSum:
    """A deferred sum that the queue computes after what it belongs to."""

    def __init__(
        self, total: Tensor, task: native.Task, staging: Staging, graph: Graph | None
    ) -> None:
        self.total, self._task, self.staging, self.graph = total, task, staging, graph
        self.has_result = False  # the call that it belongs to

    def wait(self) -> Tensor:
        if self.graph is not None:
            raise UsageError(
                "experts that a CUDA graph defers cannot be added outside of it",
                "capture all layers of a model in one graph",
            )
        wait_for(self._task.queue)
        raise_failure(self._task.queue)
        return self.total

    def failed(self) -> bool:
        return False  # the queue tells


class OnStream(Struct):
    """A call that a stream makes."""

    like: Tensor
    _staging: Staging
    _task: native.Task
    _stream: torch.cuda.Stream
    _graph: Graph | None
    _left: StreamSum | None  # to the next layer
    _added: StreamSum | None  # of the layer before

    def result(self) -> Tensor:
        """Waits for nothing: the result is there for what follows on the current stream."""
        device = self.like.device
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            if stream != self._stream:
                stream.wait_stream(self._stream)
            _launch_wait(self._task, stream.cuda_stream, self._graph)
            y = self._staging.y.to(device, non_blocking=True)
        if self._graph is not None:
            self._give_back(self._graph, stream.cuda_stream)
        raise_failure(self._task.queue)
        return as_input(self.like, y)

    def _give_back(self, graph: Graph, stream: int) -> None:
        """Memory that nobody reads any more. What is deferred reads this call's until the call that
        adds it is done."""
        if self._left is None:
            graph.give(stream, self._staging)
        else:
            self._left.has_result = True
        if self._added is not None and self._added.has_result:
            graph.give(stream, self._added.staging)


def begin(
    layer: MoELayer, inputs: Inputs, mask: Tensor, share: Share, name: str
) -> tuple[Running, Deferred | None]:
    """Begins a call, and says what it leaves: on the current stream where x is on CUDA, else in a
    thread. UsageError for what a graph cannot repeat, and for a failure of an earlier call on a
    stream."""
    if not inputs.x.is_cuda:
        return start(layer, inputs, mask, share)
    raise_failure(layer.pool.tasks)
    device = inputs.x.device
    with torch.cuda.device(device):
        stream, driver = torch.cuda.current_stream(device), cuda.driver()
        graph = _graph_of(driver, stream.cuda_stream)
        if graph is not None:
            _expect_together(inputs)
        return _begin(layer, inputs, mask, share, name, stream, graph)


def _begin(
    layer: MoELayer,
    inputs: Inputs,
    mask: Tensor,
    share: Share,
    name: str,
    stream: torch.cuda.Stream,
    graph: Graph | None,
) -> tuple[Running, Deferred | None]:
    """On this stream."""
    staging = _filled(inputs, stream.cuda_stream, graph)
    deferring = share.consumer is not None
    now, later = (torch.empty(inputs.ids.shape, dtype=torch.int64, device="cpu") for _ in "ab")
    skip = mask.clone()
    first = layer.task(
        name, staging.x, staging.ids, staging.weights, staging.y,
        skip=skip,
        mask=None if graph is None else mask,  # a replay sees the mask of its time
        add_to=_carried(share.carried, graph),
        split=(now, later, share.keep) if deferring else None,
    )  # fmt: skip
    tasks, left = [first], None  # what is deferred
    if deferring:
        total = torch.empty(staging.y.shape, dtype=torch.float32, device="cpu")
        tasks.append(
            layer.task(
                f"{name} (deferred)", staging.x, later, staging.weights, total, skip=skip
            )
        )  # fmt: skip
        left = StreamSum(total, tasks[1], staging, graph)
    for task in tasks:
        task.owners = task.owners, staging, share.carried
        _launch_start(task, stream.cuda_stream, graph)
    added = share.carried.sum if share.carried is not None else None
    running = OnStream(
        inputs.like, staging, first, stream, graph, left,
        added if isinstance(added, StreamSum) else None,
    )  # fmt: skip
    if left is None:
        return running, None
    return running, Deferred(share.producer, share.consumer or 0, inputs.tokens, left)


def _launch_start(task: native.Task, stream: int, graph: Graph | None) -> None:
    if graph is not None:
        graph.kept.append(task)
    with task.expected(starts=graph is None):
        cuda.driver().launch(stream, native.START, task.address)


def _launch_wait(task: native.Task, stream: int, graph: Graph | None) -> None:
    if graph is not None:
        graph.kept.append(task)
    with task.expected(waits=graph is None):
        cuda.driver().launch(stream, native.WAIT, task.address)


def launch_task(task: native.Task, stream: int) -> None:
    """Lets a stream, by its handle, start any task, and a graph that captures it repeat that."""
    raise_failure(task.queue)
    _launch_start(task, stream, _graph_of(cuda.driver(), stream))


def launch_wait(task: native.Task, stream: int) -> None:
    """Lets a stream, by its handle, wait for a task that was started before."""
    raise_failure(task.queue)
    _launch_wait(task, stream, _graph_of(cuda.driver(), stream))


def _filled(inputs: Inputs, stream: int, graph: Graph | None) -> Staging:
    """Memory of a call, to which its inputs are being copied."""
    given = inputs[1:]
    if graph is None:
        made = [pinned(one.shape, one.dtype) for one in (*given, inputs.x)]
        staging = Staging(*made)
    else:
        staging = graph.take(stream, inputs)
    for to, one in zip((staging.x, staging.ids, staging.weights), given, strict=True):
        to.copy_(one.detach(), non_blocking=True)
    return staging


def _expect_together(inputs: Inputs) -> None:
    for name, one in (("topk_ids", inputs.ids), ("topk_weights", inputs.weights)):
        if one.device != inputs.x.device:
            raise UsageError(
                f"{name} is on {one.device}, which a CUDA graph would not read again",
                f"copy it to {inputs.x.device} inside the graph",
            )


def _carried(carried: Deferred | None, graph: Graph | None) -> Tensor | None:
    """The sum that the layer before has left, which is computed before the queue comes to this
    layer, or now."""
    if carried is None:
        return None
    found = carried.sum
    if isinstance(found, StreamSum) and found.graph is graph:
        return found.total
    if graph is not None:
        raise UsageError(
            f"layer {carried.producer} has deferred experts before the CUDA graph began",
            "capture all layers of a model in one graph",
        )
    return found.wait()


# ---- failures


def raise_failure(queue: native.Queue) -> None:
    """UsageError for a call on a stream that has failed since this was asked last."""
    found = queue.take_failure()
    if found is None:
        return
    task, error = found
    hint = "its result is NaN: begin the pass again"
    if isinstance(error, native.NoWeightsError):
        hint = "mark such experts in gpu_experts_mask, or give -1 as their id"
    raise UsageError(f"{task.name} failed on a CUDA stream: {error}", hint)


def wait_for(queue: native.Queue) -> None:
    """Returns once all that streams were given outside of graphs is computed."""
    for task in queue.in_flight:
        task.wait_started(_expect_streams_go_on)
    queue.drain()


def _expect_streams_go_on() -> None:
    """ResourceError after a fatal error of CUDA, when streams run no host functions any more."""
    if torch.cuda.is_current_stream_capturing():
        return
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ResourceError(
            f"what streams were given is never computed, since CUDA has failed: {reason}",
            "begin the process again",
        ) from None


def drain(pool: Pool) -> None:
    """Wait for all work that streams have given a pool; raises what has failed."""
    if pool.has_tasks:
        wait_for(pool.tasks)
        raise_failure(pool.tasks)
