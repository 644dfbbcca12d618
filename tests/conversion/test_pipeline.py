"""The pipeline alone: order, memory, errors in each of its threads."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ktconv.conversion.pipeline import Job, Pipeline
from ktconv.quantize_cpu.run import SilentObserver
from ktconv.reading.reader import Span


class Staged:
    """A staging that only remembers how it ended."""

    def __init__(self, fail: str = "") -> None:
        self.fail, self.ended = fail, ""

    def commit(self) -> list[dict[str, object]]:
        if self.fail == "commit":
            raise OSError("commit")
        self.ended = "committed"
        return []

    def abandon(self) -> None:
        self.ended = "abandoned"

    def write(self, name: str, data: memoryview, offset: int) -> None: ...

    def read(self, name: str, target: memoryview, offset: int) -> None: ...


class Payload(dict[str, Any]):
    """A result that can be watched."""


class Step:
    """A task that returns a payload, or fails."""

    source_bytes = 1 << 20

    def __init__(self, watch: list[weakref.ref[Payload]], fail: str = "") -> None:
        self.watch, self.fail = watch, fail

    def spans(self) -> list[Span]:
        if self.fail == "spans":
            raise OSError("spans")
        return []

    def run(self, staging: Any, buffers: None, advance: Callable[[int], None]) -> dict[str, Any]:
        if self.fail == "run":
            raise OSError("run")
        advance(self.source_bytes)
        payload = Payload()
        self.watch.append(weakref.ref(payload))
        return {str(id(payload)): payload}


def make_job(key: int, steps: list[Step], staged: Staged, finished: list[str]) -> Job[None]:
    def finish(files: list[dict[str, object]], results: dict[str, Any]) -> None:
        finished.append(str(key))

    return Job(str(key), 1, open=lambda: staged, tasks=lambda: steps, finish=finish)


def run(jobs: Iterator[Job[None]], threads: int = 2) -> None:
    Pipeline(threads, lambda: None, SilentObserver()).run(jobs)


def test_results_are_dropped_unit_by_unit() -> None:
    """Memory does not grow with the number of units: at most the open ones hold results."""
    watch: list[weakref.ref[Payload]] = []
    alive: list[int] = []
    finished: list[str] = []

    class Counting(Staged):
        def commit(self) -> list[dict[str, object]]:
            gc.collect()
            alive.append(sum(payload() is not None for payload in watch))
            return super().commit()

    jobs = (make_job(n, [Step(watch) for _ in range(4)], Counting(), finished) for n in range(40))
    run(jobs)
    assert len(finished) == 40
    assert max(alive) <= 5 * 4


@pytest.mark.parametrize("where", ["run", "spans", "commit"])
def test_an_error_in_any_thread_ends_all(where: str) -> None:
    """It is raised, nothing hangs, and what was not committed is abandoned."""
    staged = [Staged(where if where == "commit" and n == 2 else "") for n in range(6)]
    finished: list[str] = []
    jobs = (
        make_job(n, [Step([], where if n == 2 else "") for _ in range(3)], staged[n], finished)
        for n in range(6)
    )
    before = threading.active_count()
    with pytest.raises(OSError, match=where):
        run(jobs)
    assert threading.active_count() == before
    if where != "spans":  # the prefetcher only runs ahead: what it stops can be done by then
        assert staged[2].ended != "committed"
        assert len(finished) < 6
    assert all(one.ended in ("", "committed", "abandoned") for one in staged)


def test_an_interrupt_during_the_last_commit_waits_for_it() -> None:
    """Else it goes on behind the back of a run that has given its locks back."""
    workers: list[threading.Thread] = []
    arrived = threading.Event()

    class Struck(Staged):
        def commit(self) -> list[dict[str, object]]:
            workers[0].join()  # then the main thread waits for commits alone
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            arrived.wait()
            return super().commit()

    def interrupt(*_: object) -> None:
        arrived.set()
        raise KeyboardInterrupt

    staged, finished = Struck(), list[str]()
    pipeline = Pipeline(1, lambda: workers.append(threading.current_thread()), SilentObserver())
    before, handler = threading.active_count(), signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(iter([make_job(0, [Step([])], staged, finished)]))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == before
    assert (staged.ended, finished) == ("committed", ["0"])
