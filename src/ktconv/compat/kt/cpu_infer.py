"""`CPUInfer`: the queue of tasks of KTransformers' extension, on the threads of a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from msgspec import Struct, field

from ktconv.compat.kt.streams import drain, launch_task, launch_wait
from ktconv.errors import UsageError
from ktconv.native import PythonTask
from ktconv.runtime import Pool
from ktconv.system.numbers import whole, wholes

Task = Callable[[], None]

_REMEMBERED = 64  # of the tasks that `sync_with_cuda_stream` may leave pending


class WorkerPoolConfig(Struct, dict=True):
    """Threads of each NUMA part, and the node of each; lists of one length."""

    subpool_count: int = 1
    subpool_numa_map: Sequence[int] = field(default_factory=lambda: [0])
    subpool_thread_count: Sequence[int] = field(default_factory=lambda: [1])


class CPUInfer:
    """A queue whose tasks run one after the other, each on all threads of a pool.

    CPUInfer(60), CPUInfer(WorkerPoolConfig) or CPUInfer(pool). Objects with the same threads share
    a pool; each waits for its own tasks.
    """

    def __init__(self, threads: int | WorkerPoolConfig | Pool) -> None:
        """Starts the threads. UsageError for numbers that this machine cannot have."""
        self.parts = 1
        if isinstance(threads, Pool):
            self.pool = threads
        elif isinstance(threads, WorkerPoolConfig):
            self.parts = whole("subpool_count", threads.subpool_count, 1)
            self.pool = _pool_of(threads, self.parts)
        else:
            self.pool = Pool.shared(whole("threads", threads, 1))
        self._pending: deque[PythonTask] = deque()
        self._on_streams: deque[PythonTask] = deque(maxlen=_REMEMBERED)

    @property
    def backend_(self) -> CPUInfer:
        """Itself: what `MOEConfig.pool` takes."""
        return self

    def submit(self, task: Task) -> None:
        """Queues a task, such as `AMXInt4_MOE.forward_task` returns."""
        made = self._made(task)
        made.start()
        self._pending.append(made)
        self._on_streams.append(made)

    def sync(self, allow_n_pending: int = 0) -> None:
        """Waits until at most `allow_n_pending` of the submitted tasks are left; without any, for
        all that wrappers with the same threads have submitted. Raises what a task has raised."""
        left = whole("allow_n_pending", allow_n_pending, 0)
        if not self._pending:
            self.pool.submit(_nothing).result()
            drain(self.pool)
        while len(self._pending) > left:
            done = self._pending.popleft()
            done.wait()
            if (error := done.take_error()) is not None:
                raise error

    def submit_with_cuda_stream(self, stream: int, task: Task) -> None:
        """Lets a CUDA stream, by its handle, queue a task once it comes there, and a graph that
        captures it each time. Without CUDA it is queued at once."""
        if not torch.cuda.is_available():
            self.submit(task)
            return
        made = self._made(task)
        launch_task(made, stream)
        self._on_streams.append(made)

    def sync_with_cuda_stream(self, stream: int, allow_n_pending: int = 0) -> None:
        """Lets a CUDA stream wait until at most `allow_n_pending` of the tasks are left which were
        submitted before; what one has raised, the next call raises. Without CUDA as `sync`."""
        left = whole("allow_n_pending", allow_n_pending, 0)
        if not torch.cuda.is_available():
            self.sync(left)
        elif left < len(self._on_streams):
            launch_wait(self._on_streams[-1 - left], stream)

    def _made(self, task: Task) -> PythonTask:
        if not callable(task):
            raise UsageError(f"a task is what a method *_task returns, not a {type(task).__name__}")
        return PythonTask(self.pool.tasks, "a task of CPUInfer", task)


def _nothing() -> None:
    """Does nothing, after all that was submitted before."""


def _pool_of(config: WorkerPoolConfig, parts: int) -> Pool:
    nodes = wholes("subpool_numa_map", config.subpool_numa_map)
    threads = wholes("subpool_thread_count", config.subpool_thread_count, 1)
    for name, numbers in (("subpool_numa_map", nodes), ("subpool_thread_count", threads)):
        if len(numbers) != parts:
            raise UsageError(f"{name} has {len(numbers)} numbers, but subpool_count is {parts}")
    return Pool.shared(sum(threads), nodes)
