"""Tasks that CUDA streams start and wait for, without the interpreter; see kt_task."""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakSet

from ktconv._native import ffi, lib
from ktconv.native.adapters import ChosenAdapters
from ktconv.native.arrays import Array, aligned_bytes, check
from ktconv.native.moe import Call, Layer
from ktconv.native.pool import Pool, open_pool


def _address(function: str) -> int:
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))


# Host functions, by their addresses: of a task, of a task, of a Flag.
START, WAIT, RAISE = (_address(f"kt_{name}") for name in ("task_start", "task_wait", "flag_raise"))
_RUN_CALL = ffi.addressof(lib, "kt_moe_work_run")

# What streams still name: tasks, and what else `immortal` was given. The interpreter's end does not
# free it, since a GPU may come to host functions until the process has ended.
_on_streams: dict[Task, None] = {}
_lock = threading.Lock()  # of it


def immortal(container: object) -> None:
    """Keep a container, and what is in it, beyond the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(container))


immortal(_on_streams)


class Flag:
    """A number that the host function RAISE sets to 1."""

    def __init__(self) -> None:
        self._value = ffi.new("int32_t *")
        self.address = int(ffi.cast("uintptr_t", self._value))

    @property
    def raised(self) -> bool:
        """Whether the host function has run."""
        return bool(self._value[0])


class Queue:
    """A thread that runs tasks one after the other, in the order in which they are started.
    ValueError where the system does not allow another thread."""

    def __init__(self) -> None:
        out = ffi.new("kt_queue **")
        check(lib.kt_queue_create(out))
        self.c = ffi.gc(out[0], lib.kt_queue_destroy)
        self.failures = ffi.new("int32_t *")
        self.tasks: WeakSet[Task] = WeakSet()
        self.lock = threading.Lock()  # of all its tasks and of its failures
        self._seen, self._scratch = 0, aligned_bytes(0)

    def scratch(self, size: int, make: Callable[[int], Array] = aligned_bytes) -> Array:
        """At least `size` bytes for one of its tasks, which all use the same: they run one after
        the other. `make` returns new memory, given its size."""
        with self.lock:
            if self._scratch.nbytes < size:
                self._scratch = make(size)  # earlier tasks keep theirs
            return self._scratch

    def drain(self) -> None:
        """Waits for all that was started."""
        lib.kt_queue_drain(self.c)

    @property
    def in_flight(self) -> list[Task]:
        """Tasks that were started, or are to be by streams outside of graphs, and are not done."""
        _keep()
        with _lock:
            kept = list(_on_streams)
        return [task for task in kept if task.queue is self and not task.finished]

    def take_failure(self) -> tuple[Task, Exception] | None:
        """A task whose work has failed since this was asked last, and its error; None where none
        has. Those of other tasks are forgotten."""
        with self.lock:
            failures = self.failures[0]
            if failures == self._seen:
                return None
            self._seen = failures
            found = [(task, error) for task in list(self.tasks) if (error := task.take_error())]
            return found[0] if found else None


class Task(ABC):
    """Work of a queue, that runs as often as it is started; `name` is what messages call it. It
    lives until all that `expected` tells of has happened; what else names its `address` must keep
    it."""

    def __init__(self, queue: Queue, name: str, run: Any, context: Any) -> None:
        self.queue, self.name, self._context = queue, name, context
        self.owners: Any = None  # of memory that its work uses
        self._starts = self._waits = 0  # that are to come, or have come
        self._c = ffi.new("kt_task *", {"queue": queue.c, "run": run, "context": context})
        self.address = int(ffi.cast("uintptr_t", self._c))
        with queue.lock:
            queue.tasks.add(self)

    @contextmanager
    def expected(self, starts: int = 0, waits: int = 0) -> Iterator[None]:
        """Announce starts and waits that the block puts on a stream; the task is kept until all
        of them have come. Takes them back where the block raises."""
        with _lock:
            self._starts += starts
            self._waits += waits
        try:
            _keep(self)
            yield
        except BaseException:
            with _lock:
                self._starts -= starts
                self._waits -= waits
            raise

    def start(self) -> None:
        """Lets the queue run it once."""
        with self.expected(starts=1):
            lib.kt_task_start(self._c)

    def wait(self) -> None:
        """Returns once it has run as often as it was started."""
        lib.kt_task_wait(self._c)

    def wait_started(self, check: Callable[[], object]) -> None:
        """Return once streams have come to all starts of the task. `check` is called now and then;
        it raises where streams never will."""
        for look in count(1):
            if self.counts()[0] >= self._starts:
                return
            time.sleep(5e-5)
            if look % 1000 == 0:
                check()

    def counts(self) -> tuple[int, int, int]:
        """Numbers of times the task was started, was done, and was waited for."""
        out = ffi.new("int64_t[3]")
        lib.kt_task_counts(self._c, out, out + 1, out + 2)
        return out[0], out[1], out[2]

    @property
    def finished(self) -> bool:
        """Whether streams have come to all host functions of this task, and its work is done."""
        started, done, waited = self.counts()
        return started >= self._starts and done >= started and waited >= self._waits

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether `take_error` has something to tell."""

    @abstractmethod
    def take_error(self) -> Exception | None:
        """The first error of the task's work since the last call; None: there was none."""


def _keep(*more: Task) -> None:
    """Keeps these tasks, too, and no longer the first that are finished, as most do in the order in
    which they were started; of those that failed somebody must learn first."""
    finished = []  # which are not freed under the lock
    with _lock:
        _on_streams.update(dict.fromkeys(more))
        for task in list(_on_streams):
            if not task.finished:
                break
            if not task.failed:
                finished.append(task)
                del _on_streams[task]


class CallTask(Task):
    """A call of a layer. `call` describes it, and must be in memory that outlives the task, as
    `scratch` must.

    `mask`: the address of bool [experts], copied to `skip`, which is what the call skips, when the
    work begins; 0: none. `now`, `later`: addresses of int64 [tokens, top_k], 0 where nothing is
    deferred: the ids of each token's `keep` experts of largest weight, which are computed, and of
    the others.
    """

    def __init__(
        self,
        queue: Queue,
        name: str,
        layer: Layer,
        pool: Pool,
        call: Call,
        scratch: Array,
        adapters: ChosenAdapters | None = None,
        *,
        mask: int = 0,
        skip: int = 0,
        now: int = 0,
        later: int = 0,
        keep: int = 0,
    ) -> None:
        self._own = ffi.new("kt_moe_work *")
        self._keep = layer, call, scratch, adapters
        work, self._pool = self._own, open_pool(pool)  # which stays when the pool is closed
        work.moe, work.pool, work.call = layer.c, self._pool, call.c[0]
        work.adapters = ffi.NULL if adapters is None else adapters.c
        work.scratch, work.scratch_size = ffi.from_buffer(scratch), scratch.nbytes
        work.mask, work.skip = ffi.cast("uint8_t *", mask), ffi.cast("uint8_t *", skip)
        work.now, work.later = ffi.cast("int64_t *", now), ffi.cast("int64_t *", later)
        work.keep, work.failures = keep, queue.failures
        super().__init__(queue, name, _RUN_CALL, work)

    @property
    def failed(self) -> bool:
        return bool(self._own.status != lib.KT_OK)

    def take_error(self) -> Exception | None:
        status, self._own.status = self._own.status, lib.KT_OK
        try:
            check(status)
        except Exception as error:
            return error
        return None


class PythonTask(Task):
    """A function of Python, which the queue's thread calls with the GIL. Where it raises,
    `on_error` is called, and the queue goes on."""

    def __init__(
        self,
        queue: Queue,
        name: str,
        function: Callable[[], Any],
        on_error: Callable[[], Any] = lambda: None,
    ) -> None:
        self._function, self._on_error = function, on_error
        self._error: Exception | None = None
        self._handle = ffi.new_handle(self)
        super().__init__(queue, name, lib.ktconv_run_python, self._handle)

    def call(self) -> None:
        """Run the function, in the queue's thread."""
        try:
            self._function()
        except Exception as error:
            self._error = self._error or error
            self._on_error()
            self.queue.failures[0] += 1

    @property
    def failed(self) -> bool:
        return self._error is not None

    def take_error(self) -> Exception | None:
        error, self._error = self._error, None
        return error


@ffi.def_extern()  # type: ignore[untyped-decorator]
def ktconv_run_python(context: Any) -> None:
    """The work of a PythonTask."""
    ffi.from_handle(context).call()
