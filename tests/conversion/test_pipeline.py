"""The pipeline alone: order, memory, errors in each of its threads."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ktconv.conversion.pipeline import Observer, Pipeline
from ktconv.conversion.plan import Unit
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.reader import Span
from ktconv.targets.packed.target import KTransformersTarget, Options


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

    def mapped(self, name: str, nbytes: int, offset: int) -> None: ...

    def place(self, name: str) -> tuple[Path, int]:
        return Path(name), 0


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

    def run(self, staging: Any, buffers: Buffers, advance: Callable[[int], None]) -> dict[str, Any]:
        if self.fail == "run":
            raise OSError("run")
        advance(self.source_bytes)
        payload = Payload()
        self.watch.append(weakref.ref(payload))
        return {str(id(payload)): payload}


@dataclass
class Planned:
    """Units 0, 1, ... with a staging and steps each."""

    staged: list[Staged]
    steps: Callable[[int], list[Step]]
    done: list[str] = field(default_factory=list)

    def stage(self, unit: Unit) -> Staged:
        staged = self.staged[int(unit.key)]
        if staged.fail == "stage":
            raise OSError("stage")
        return staged

    def tasks(self, unit: Unit) -> list[Step]:
        if self.staged[int(unit.key)].fail == "tasks":
            raise OSError("tasks")
        return self.steps(int(unit.key))

    def confirm(self, unit: Unit) -> None:
        pass

    def finished(self, unit: Unit, files: list[dict[str, object]], tensors: dict[str, Any]) -> None:
        self.done.append(unit.key)

    def run(self, threads: int = 2) -> None:
        target = KTransformersTarget(Options())
        units = [Unit(str(n), target) for n in range(len(self.staged))]
        Pipeline(threads, BufferSizes(), self, Observer()).run(units)


def test_results_are_dropped_unit_by_unit() -> None:
    """Memory does not grow with the number of units: at most the open ones hold results."""
    watch: list[weakref.ref[Payload]] = []
    alive: list[int] = []

    class Counting(Staged):
        def commit(self) -> list[dict[str, object]]:
            gc.collect()
            alive.append(sum(payload() is not None for payload in watch))
            return super().commit()

    work = Planned([Counting() for _ in range(40)], lambda n: [Step(watch) for _ in range(4)])
    work.run()
    assert len(work.done) == 40
    assert max(alive) <= 5 * 4


def test_tasks_run_while_the_next_unit_is_opened() -> None:
    """Opening a unit allocates its files, which takes long in memory: no worker waits for it."""
    ran = threading.Semaphore(0)
    seen: list[bool] = []

    class Counted(Step):
        def run(self, *rest: Any) -> dict[str, Any]:
            result = super().run(*rest)
            ran.release()
            return result

    class Slow(Planned):
        def stage(self, unit: Unit) -> Staged:
            if unit.key == "1":  # returns when all tasks of unit 0 are done
                seen.extend(ran.acquire(timeout=60) for _ in range(3))
            return super().stage(unit)

    work = Slow([Staged(), Staged()], lambda n: [Counted([]) for _ in range(3)])
    work.run()
    assert (seen, work.done) == ([True] * 3, ["0", "1"])


@pytest.mark.parametrize("where", ["run", "spans", "commit", "stage", "tasks"])
def test_an_error_in_any_thread_ends_all(where: str) -> None:
    """It is raised, nothing hangs, and what was not committed is abandoned."""
    in_unit = where in ("commit", "stage", "tasks")
    staged = [Staged(where if in_unit and n == 2 else "") for n in range(6)]
    work = Planned(staged, lambda n: [Step([], where if n == 2 else "") for _ in range(3)])
    before = threading.active_count()
    with pytest.raises(OSError, match=where):
        work.run()
    assert threading.active_count() == before
    if where != "spans":  # the prefetcher only runs ahead: what it stops can be done by then
        assert staged[2].ended != "committed"
        assert len(work.done) < 6
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

    class Watched(Step):
        def run(self, *rest: Any) -> dict[str, Any]:
            workers.append(threading.current_thread())
            return super().run(*rest)

    work = Planned([staged := Struck()], lambda n: [Watched([])])
    before, handler = threading.active_count(), signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            work.run(threads=1)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == before
    assert (staged.ended, work.done) == ("committed", ["0"])
