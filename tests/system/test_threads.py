"""Tasks done by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ktconv.system.threads import run_tasks


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_every_task_is_done_once(threads: int) -> None:
    done: list[int] = []
    made: list[int] = []

    def worker() -> Callable[[int], None]:
        made.append(threading.get_ident())
        return done.append

    run_tasks(list(range(50)), worker, threads)
    assert sorted(done) == list(range(50))
    assert 1 <= len(made) <= min(threads, 50)


def test_each_thread_has_its_own_worker() -> None:
    """Both are at a task at once, and neither uses what the other has."""
    meet = threading.Barrier(2, timeout=30)
    users: dict[int, set[int]] = {}

    def worker() -> Callable[[int], None]:
        own = len(users)
        users[own] = set()

        def run(task: int) -> None:
            users[own].add(threading.get_ident())
            meet.wait()

        return run

    run_tasks(list(range(2)), worker, 2)
    assert [len(idents) for idents in users.values()] == [1, 1]


def test_nothing_is_begun_after_an_error() -> None:
    begun: list[int] = []

    def run(task: int) -> None:
        begun.append(task)
        raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task 0"):
        run_tasks(list(range(1000)), lambda: run, 1)
    assert begun == [0]


def test_an_error_of_a_worker_is_raised() -> None:
    def worker() -> Callable[[int], None]:
        raise MemoryError("no buffers")

    with pytest.raises(MemoryError, match="no buffers"):
        run_tasks([1, 2, 3], worker, 2)


def test_no_tasks() -> None:
    run_tasks([], lambda: pytest.fail("no thread is needed"), 4)
