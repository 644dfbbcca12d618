"""Tasks done by several threads."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ktconv.system.threads import AwaitedThread, run_tasks


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


def test_of_several_errors_that_of_the_earliest_task_is_raised() -> None:
    """Here the thread of task 0 goes on to task 2, which fails before task 1 does."""
    begun, failed = threading.Event(), threading.Event()

    def run(task: int) -> None:
        if task == 0:
            begun.wait(30)
            return
        if task == 1:
            begun.set()
            failed.wait(30)
        failed.set()
        raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task 1"):
        run_tasks([0, 1, 2], lambda: run, 2)


def test_an_error_of_a_worker_is_raised() -> None:
    def worker() -> Callable[[int], None]:
        raise MemoryError("no buffers")

    with pytest.raises(MemoryError, match="no buffers"):
        run_tasks([1, 2, 3], worker, 2)


def test_no_tasks() -> None:
    run_tasks([], lambda: pytest.fail("no thread is needed"), 4)


class Interrupts:
    """SIGINT raises KeyboardInterrupt, and `come` is set when it does."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def __call__(self, *_: object) -> None:
        self.come.set()
        raise KeyboardInterrupt

    def send(self) -> None:
        """To the main thread, where alone they arrive; waits until one has."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.come.wait()


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


def test_a_thread_is_awaited_in_spite_of_interrupts(interrupts: Interrupts) -> None:
    ended = threading.Event()

    def loop() -> None:
        begin.wait()
        interrupts.send()
        go.wait()
        ended.set()

    begin, go, thread = threading.Event(), threading.Event(), AwaitedThread(loop)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        begin.set()
        thread.wait()
    assert thread.is_alive()
    go.set()
    thread.wait()
    assert ended.is_set() and not thread.is_alive()


def test_waiting_for_a_thread_shares_no_condition_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in Condition.wait can release the lock that the thread then holds, to set an
    event: it ended with a traceback."""
    ended: list[bool] = []
    thread = AwaitedThread(lambda: (time.sleep(0.2), ended.append(True))[1])
    thread.start()

    def waited(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(threading.Condition, "wait", waited)
    thread.wait()
    assert ended == [True]
