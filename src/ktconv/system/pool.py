"""Threads of the C library, placed on this machine.

    with Pool() as pool:          # one thread per usable core, on all NUMA nodes
        layer.touch(pool)

Python threads may share a pool: their calls come one after the other. A child process
(fork) cannot use its parent's pool and gets a ValueError; `Pool.shared()` gives it its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn

from ktconv import native
from ktconv.errors import ResourceError, UsageError
from ktconv.system import machine
from ktconv.system import nodes as numa
from ktconv.system.arrays import Array
from ktconv.system.threads import run_placed
from ktconv.system.units import counted


class Pool(native.Pool):
    """Raises UsageError for numbers that this machine cannot have, ResourceError if the system
    does not allow that many threads."""

    def __init__(
        self, threads: int | None = None, nodes: int | Collection[int] | None = None
    ) -> None:
        """`threads`: default one per usable core. `nodes`: how many NUMA nodes to use, or the
        system's numbers of those to use; default: all."""
        place = machine.placement(threads, nodes)
        self.workspaces: deque[Array] = deque()  # of the runtime, that no call uses
        self._queue: ThreadPoolExecutor | None = None
        self._tasks: native.Queue | None = None
        self._closed = False
        self._submitting = threading.Lock()
        self._process = os.getpid()
        self.os_nodes = place.os_nodes  # by the system's numbers
        self.placed = place.cpus is not None
        at = place.nodes or [0] * place.threads
        self.threads_of = [at.count(node) for node in range(len(self.os_nodes))]  # each node's
        try:
            super().__init__(place.threads, place.cpus, place.nodes)
        except ValueError as error:
            raise ResourceError(
                f"{counted(place.threads, 'thread')} cannot be started: {error}",
                "use fewer threads, or raise the limits of the user or container",
            ) from error

    @property
    def nodes(self) -> int:
        """Number of NUMA nodes that the threads are on."""
        return len(self.os_nodes)

    def bind(self, memory: Array, node: int) -> None:
        """Sees to it that `memory`, which nobody has written to yet, comes from where the threads
        of node `node`, from 0 on, run: as far as the system allows it."""
        if self.placed and not native.bind_memory(memory, self.os_nodes[node]):
            self._touch(memory, node)

    def _touch(self, memory: Array, node: int) -> None:
        """Writes to each page from a thread of the node, where the system refuses to bind them."""

        def touch() -> None:
            memory[:: native.PAGE] = 0

        run_placed([(numa.cpus_of(self.os_nodes[node]), [touch])])

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Work may be given to the pool's queues inside. UsageError for a pool that is closed or
        the parent process's."""
        if not self._is_here():
            raise UsageError("the pool belongs to the parent process", "make one in this process")
        with self._submitting:
            if self._closed:
                raise UsageError("the pool is closed")
            yield

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs `work` in a thread of its own, after all that was submitted before. UsageError for a
        pool that is closed or the parent process's, and where the interpreter is about to end."""
        with self._open():
            if self._queue is None:
                self._queue = ThreadPoolExecutor(1, "ktconv")
            try:
                return self._queue.submit(work)
            except RuntimeError as error:
                raise UsageError(f"the call cannot be submitted: {error}") from None

    @property
    def tasks(self) -> native.Queue:
        """The queue of what CUDA streams start. UsageError as for `submit`; ResourceError where the
        system does not allow its thread."""
        with self._open():
            if self._tasks is None:
                try:
                    self._tasks = native.Queue()
                except ValueError as error:
                    raise ResourceError(
                        f"the thread of CUDA streams cannot be started: {error}",
                        "raise the limits of the user or container",
                    ) from None
            return self._tasks

    @property
    def has_tasks(self) -> bool:
        """Whether `tasks` was asked for."""
        return self._tasks is not None

    def close(self) -> None:
        """Ends the threads, once what was submitted is done, and what other threads compute at the
        moment; the pool cannot be used afterwards."""
        if self._is_here():
            with self._submitting:
                self._closed = True
            if self._queue is not None:
                self._queue.shutdown()
            self._tasks = None  # those that exist keep it
        self.workspaces.clear()
        super().close()

    def _is_here(self) -> bool:
        """False in a child process, which has neither the threads nor who would unlock."""
        return self._process == os.getpid()

    def __deepcopy__(self, memo: object) -> Pool:
        """Itself: copies of what uses it have the same threads."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError("threads cannot be pickled", "make a pool in each process")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def shared(cls, threads: int | None = None, nodes: int | Collection[int] | None = None) -> Pool:
        """The process's own pool of these settings, made at the first call; not to be closed."""
        key = threads, tuple(sorted(set(nodes))) if isinstance(nodes, Collection) else nodes
        with _shared.lock:
            if key not in _shared.pools:
                _shared.pools[key] = cls(threads, nodes)
            return _shared.pools[key]

    @classmethod
    def all_shared(cls) -> Sequence[Pool]:
        """The pools that `shared` has made in this process."""
        with _shared.lock:
            return list(_shared.pools.values())


class _Shared:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.pools: dict[object, Pool] = {}


_shared = _Shared()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.reset)
