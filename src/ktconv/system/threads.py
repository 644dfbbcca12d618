"""Tasks done by threads, each with what it needs for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Task = TypeVar("Task")


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
