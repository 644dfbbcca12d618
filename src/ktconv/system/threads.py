"""Tasks done by threads, each with what it needs for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    tasks: Sequence[Task], worker: Callable[[], Callable[[Task], None]], threads: int
) -> None:
    """Does all tasks, begun in their order, by up to `threads` threads.

    Each thread calls `worker` once, which returns what does its tasks: buffers need no locks. The
    first error ends all threads after their present task, and is raised.
    """
    pending, lock, stopped = iter(tasks), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            run = worker()
            while not stopped.is_set():
                with lock:
                    task = next(pending, None)
                if task is None:
                    return
                run(task)
        finally:
            stopped.set()  # after an error, or because nothing is left

    with ThreadPoolExecutor(max(1, min(threads, len(tasks)))) as pool:
        futures = [pool.submit(work) for _ in range(min(threads, len(tasks)))]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()  # also after an interrupt


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
