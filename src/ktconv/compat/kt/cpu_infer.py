"""`CPUInfer`: the queue of tasks of KTransformers' extension, on the threads of a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ktconv.errors import UsageError
from ktconv.runtime import Pool
from ktconv.system.numbers import whole, wholes

Task = Callable[[], None]


@dataclass
class WorkerPoolConfig:
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
        self._pending: deque[Future[Any]] = deque()

    @property
    def backend_(self) -> CPUInfer:
        """Itself: what `MOEConfig.pool` takes."""
        return self

    def submit(self, task: Task) -> None:
        """Queues a task, such as `AMXInt4_MOE.forward_task` returns."""
        if not callable(task):
            raise UsageError(f"a task is what a method *_task returns, not a {type(task).__name__}")
        self._pending.append(self.pool.submit(task))

    def sync(self, allow_n_pending: int = 0) -> None:
        """Waits until at most `allow_n_pending` of the submitted tasks are left. Raises what a task
        has raised."""
        left = whole("allow_n_pending", allow_n_pending, 0)
        if not self._pending:
            self.pool.submit(_nothing).result()  # tasks of others are done, too
        while len(self._pending) > left:
            self._pending.popleft().result()

    def submit_with_cuda_stream(self, stream: int, task: Task) -> None:
        """Queues a task whose inputs are in host memory already. UsageError for another stream than
        0: `KTMoEWrapper` waits for the copies of its inputs itself."""
        _expect_no_stream(stream)
        self.submit(task)

    def sync_with_cuda_stream(self, stream: int, allow_n_pending: int = 0) -> None:
        """Waits as `sync` does. UsageError for another stream than 0."""
        _expect_no_stream(stream)
        self.sync(allow_n_pending)


def _nothing() -> None:
    """Does nothing, after all that was submitted before."""


def _pool_of(config: WorkerPoolConfig, parts: int) -> Pool:
    nodes = wholes("subpool_numa_map", config.subpool_numa_map)
    threads = wholes("subpool_thread_count", config.subpool_thread_count, 1)
    for name, numbers in (("subpool_numa_map", nodes), ("subpool_thread_count", threads)):
        if len(numbers) != parts:
            raise UsageError(f"{name} has {len(numbers)} numbers, but subpool_count is {parts}")
    return Pool.shared(sum(threads), nodes)


def _expect_no_stream(stream: int) -> None:
    if stream:
        raise UsageError(
            "ktconv's CPUInfer puts nothing on a CUDA stream",
            "call KTMoEWrapper.submit_forward, or submit once the inputs are in host memory",
        )
