"""Runs units of commit through worker threads: reading, computing and writing overlap.

Workers take tasks in order. A prefetcher asks the kernel to read ahead, workers
read, compute and write them, and a committer makes finished units durable while the
workers are at the next ones. Memory is that of the workers, whatever the size of the job.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from ktconv.conversion.plan import Unit
from ktconv.errors import KtconvError
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.reader import Span, advise
from ktconv.system.threads import AwaitedThread
from ktconv.writer.staging import Staging

PREFETCH_BYTES = 256 << 20  # read ahead of the workers, in the page cache
ADVISE_BYTES = 64 << 20  # asked for at once
OPEN_UNITS = 3  # one being committed, one being finished, one being started


class Task(Protocol):
    """The smallest piece of work, e.g. one projection of one expert."""

    @property
    def source_bytes(self) -> int: ...

    def spans(self) -> Sequence[Span]:
        """Spans that it will read."""

    def run(
        self, staging: Staging, buffers: Buffers, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        """Do it; calls `advance` with bytes of source done. The result goes to the journal."""


class Work(Protocol):
    """Work on each unit."""

    def stage(self, unit: Unit) -> Staging:
        """Staging of a unit, to which its tensors are written until they are final."""

    def tasks(self, unit: Unit) -> Sequence[Task]: ...

    def confirm(self, unit: Unit) -> None:
        """Raise what speaks against making its files final."""

    def finished(self, unit: Unit, files: list[dict[str, object]], tensors: dict[str, Any]) -> None:
        """Record a unit whose files are final; `tensors` are the results of its tasks."""


class _OpenUnit(Struct, eq=False):
    """A unit under way."""

    unit: Unit
    staging: Staging
    pending: int = 0  # tasks
    results: dict[str, Any] = field(default_factory=dict)


class Observer:
    """Receives progress; this base does nothing. Called from several threads, one at a time."""

    def begin(self, keys: list[str]) -> None:
        """Begin with the units that will be converted now."""

    def advanced(self, source_bytes: int) -> None:
        """Report `source_bytes` more of the source as done."""

    def unit_started(self, key: str) -> None:
        """A unit, like layer-00003, is being converted."""

    def unit_finished(self, key: str) -> None:
        """A unit has its final name, and survives a power loss."""

    def noted(self, text: str) -> None:
        """A sentence for the user, for example what the run waits for."""


class Pipeline:
    """Runs units in order with `threads` workers, each with buffers of its own."""

    def __init__(self, threads: int, sizes: BufferSizes, work: Work, observer: Observer) -> None:
        self._threads, self._sizes, self._work, self._observer = threads, sizes, work, observer
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # Of the same lock: woken for each task, the prefetcher would take time of workers.
        self._taken_enough = threading.Condition(lock)
        self._wanted_bytes = 0  # taken, for which the prefetcher waits
        self._units: deque[Unit] = deque()
        self._ready: deque[tuple[_OpenUnit, Task]] = deque()
        self._ready_bytes = 0
        self._taken_bytes = 0
        self._open: list[_OpenUnit] = []
        self._opening = False  # a unit, by one of the workers
        self._error: BaseException | None = None
        self._stopped = False
        self._commits: queue.SimpleQueue[_OpenUnit | None] = queue.SimpleQueue()
        self._prefetch: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def run(self, units: Iterable[Unit]) -> None:
        """Run all units. The first error stops all threads and is raised; what was staged
        and not committed is removed. An interrupt ends in the same clean way."""
        self._units.extend(units)
        workers: list[AwaitedThread] = []
        others: list[AwaitedThread] = []
        try:
            # One by one: the system can refuse a thread, and those before it must be joined.
            for loop in (self._commit_loop, self._prefetch_loop):
                others.append(self._start(loop))
            for _ in range(self._threads):
                workers.append(self._start(self._work_loop))
            self._wait_for(workers, others)
        except BaseException as error:
            self._stop(error)
        self._wait_for(workers, others)
        for opened in self._open:
            # If several errors occur, the first one is reported.
            with contextlib.suppress(OSError, KtconvError):
                opened.staging.abandon()
        if self._error is not None:
            raise self._error

    def _wait_for(self, workers: Sequence[AwaitedThread], others: Sequence[AwaitedThread]) -> None:
        """The last commit can take long, and an interrupt come meanwhile."""
        for thread in workers:
            thread.wait()
        self._commits.put(None)
        self._prefetch.put(None)
        for thread in others:
            thread.wait()

    def _start(self, loop: Callable[[], None]) -> AwaitedThread:
        def guarded() -> None:
            try:
                loop()
            except BaseException as error:
                self._stop(error)

        thread = AwaitedThread(guarded)
        thread.start()
        return thread

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()
            self._taken_enough.notify_all()

    def _work_loop(self) -> None:
        buffers = Buffers(self._sizes)
        while (item := self._take()) is not None:
            opened, task = item
            result = task.run(opened.staging, buffers, self._advance)
            with self._changed:
                opened.results.update(result)
                opened.pending -= 1
                if opened.pending == 0:
                    self._commits.put(opened)

    def _take(self) -> tuple[_OpenUnit, Task] | None:
        while True:
            with self._changed:
                while not (self._stopped or self._ready or self._may_open):
                    if not self._units and not self._opening:
                        return None
                    self._changed.wait()
                if self._stopped:
                    return None
                if not self._may_open:
                    return self._take_ready()
                unit, self._opening = self._units.popleft(), True
            self._start_unit(unit)

    @property
    def _may_open(self) -> bool:
        """Whether the next unit is to be opened now, by who asks."""
        few = self._ready_bytes < PREFETCH_BYTES and len(self._open) < OPEN_UNITS
        return bool(self._units) and few and not self._opening

    def _take_ready(self) -> tuple[_OpenUnit, Task]:
        opened, task = self._ready.popleft()
        self._ready_bytes -= task.source_bytes
        self._taken_bytes += task.source_bytes
        if self._taken_bytes >= self._wanted_bytes:
            self._taken_enough.notify()
        return opened, task

    def _start_unit(self, unit: Unit) -> None:
        """Open a unit. Without the lock: its files are allocated, which takes long in memory, and
        other workers have tasks meanwhile."""
        opened = _OpenUnit(unit, self._work.stage(unit))
        with self._changed:
            self._open.append(opened)
            self._observer.unit_started(unit.key)
        tasks = self._work.tasks(unit)
        with self._changed:
            opened.pending = len(tasks)
            for task in tasks:
                self._ready.append((opened, task))
                self._ready_bytes += task.source_bytes
                self._prefetch.put(task)
            if not tasks:  # a layer none of whose experts are converted
                self._commits.put(opened)
            self._opening = False
            self._changed.notify_all()

    def _advance(self, source_bytes: int) -> None:
        with self._changed:
            if self._stopped:
                raise _Stopped
            self._observer.advanced(source_bytes)

    def _commit_loop(self) -> None:
        while (opened := self._commits.get()) is not None:
            self._work.confirm(opened.unit)
            self._work.finished(opened.unit, opened.staging.commit(), opened.results)
            with self._changed:
                self._open.remove(opened)
                self._observer.unit_finished(opened.unit.key)
                self._changed.notify_all()

    def _prefetch_loop(self) -> None:
        advised = 0
        while (task := self._prefetch.get()) is not None:
            spans, more = list(task.spans()), task.source_bytes
            # Together, as far as is known: neighbours in a file are one request to a server.
            while more < ADVISE_BYTES and (following := self._waiting()) is not None:
                spans += following.spans()
                more += following.source_bytes
            advise(spans)
            advised += more
            with self._changed:
                self._wanted_bytes = advised - PREFETCH_BYTES
                while not self._stopped and self._taken_bytes < self._wanted_bytes:
                    self._taken_enough.wait()
                if self._stopped:
                    return

    def _waiting(self) -> Task | None:
        """The next task to prefetch, if it is known; the end stays for who waits for it."""
        try:
            task = self._prefetch.get_nowait()
        except queue.Empty:
            return None
        if task is None:
            self._prefetch.put(None)
        return task


class _Stopped(BaseException):
    """Ends a task early; another error or an interrupt is already known."""
