"""Tasks done by threads, each with what it needs for itself."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    tasks: Sequence[Task], worker: Callable[[], Callable[[Task], None]], threads: int
) -> None:
    """Does all tasks, begun in their order, by up to `threads` threads.

    Each thread calls `worker` once, which returns what does its tasks: buffers need no locks. The
    first error ends all threads after their present task. Of several errors that of the earliest
    task is raised, whichever thread was faster: it had begun before all later ones.
    """
    pending, lock, stopped = iter(enumerate(tasks)), threading.Lock(), threading.Event()
    errors: dict[int, Exception] = {}

    def work() -> None:
        try:
            run = worker()
            while not stopped.is_set():
                with lock:
                    number, task = next(pending, (-1, None))
                if task is None:
                    return
                try:
                    run(task)
                except Exception as error:
                    errors[number] = error
                    return
        finally:
            stopped.set()  # after an error, or because nothing is left

    with ThreadPoolExecutor(max(1, min(threads, len(tasks)))) as pool:
        futures = [pool.submit(work) for _ in range(min(threads, len(tasks)))]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()  # also after an interrupt
    if errors:
        raise errors[min(errors)]


# Tasks, and the CPUs that their threads run on (empty: any).
Placed = tuple[Collection[int], Sequence[Callable[[], None]]]


def run_placed(groups: Sequence[Placed], most: int = 8) -> None:
    """Does the tasks of all groups at the same time, each group's by up to `most` threads on its
    CPUs, begun in their order. The first error ends all threads after their present task, and is
    raised. A CPU that is not for this process is no error."""
    taken: list[tuple[Collection[int], Callable[[], Callable[[], None] | None]]] = []
    lock, stopped = threading.Lock(), threading.Event()
    for cpus, tasks in groups:
        pending = iter(tasks)

        def take(pending: Any = pending) -> Callable[[], None] | None:
            with lock:
                return next(pending, None)

        taken += [(cpus, take)] * min(most, len(tasks), len(cpus) or most)

    def work(cpus: Collection[int], take: Callable[[], Callable[[], None] | None]) -> None:
        move_to(cpus)
        try:
            while not stopped.is_set() and (task := take()) is not None:
                task()
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(max(1, len(taken))) as pool:  # new threads: they stay on their CPUs
        futures = [pool.submit(work, *one) for one in taken]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()


def move_to(cpus: Collection[int]) -> None:
    """Has the calling thread run on these CPUs alone, where the system allows it."""
    if cpus and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


class AwaitedThread(threading.Thread):
    """A thread whose end can be waited for in spite of interrupts.

    Before Python 3.13 an interrupt in `join` marks a thread as ended that still runs, and one in
    `Event.wait` can release the lock of the thread that is about to set the event.
    """

    def __init__(self, loop: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._loop, self._ended, self._running = loop, False, threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        try:
            self._loop()
        finally:
            self._ended = True
            self._running.release()

    def wait(self) -> None:
        while not self._ended:
            # In slices, so that signals reach this thread. An interrupt may come behind it.
            if self._running.acquire(timeout=0.5):
                self._running.release()
        self.join()


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let PyTorch compute with `count` threads of its own inside, and with as many as before
    afterwards: the number is the process's, whose other code has chosen it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
