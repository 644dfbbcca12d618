"""Many checks through worker threads, one after the other, in one pass over the bytes."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from ktconv.conversion.pipeline import Observer
from ktconv.reading.buffers import Buffers, BufferSizes

T = TypeVar("T")
R = TypeVar("R")
Found = TypeVar("Found", covariant=True)
Advance = Callable[[int], None]


class Check(Protocol[Found]):
    """Something to read and check: a matrix, or a tensor that was copied."""

    @property
    def unit(self) -> str:
        """What it counts to for progress: a layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of progress."""

    def run(self, buffers: Buffers, advance: Advance) -> Found: ...


def sizes_by_unit(checks: Iterable[Check[R]]) -> dict[str, int]:
    """Bytes of progress."""
    sizes: Counter[str] = Counter()
    for check in checks:
        sizes[check.unit] += check.nbytes
    return dict(sizes)


def run_checks(
    checks: Sequence[Check[R]], sizes: BufferSizes, threads: int, observer: Observer | None
) -> Iterator[R]:
    """What each finds, in order, by threads with buffers of their own. The first error ends it."""
    local, progress = threading.local(), _Progress(checks, observer)

    def run(check: Check[R]) -> R:
        if not hasattr(local, "buffers"):
            local.buffers = Buffers(sizes)
        return check.run(local.buffers, progress.advance)

    started = map(progress.start, checks)
    for check, found in zip(checks, in_order(run, started, threads, 2 * threads), strict=True):
        progress.finish(check.unit)
        yield found


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Iterator[R]:
    """Results in the order of the items, `ahead` of which run or wait. The first error ends it."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Progress:
    """Tells an observer about units, whose checks come one after the other."""

    def __init__(self, checks: Sequence[Check[R]], observer: Observer | None) -> None:
        self._observer, self._lock = observer, threading.Lock()
        self._left = Counter(check.unit for check in checks)
        self._started: set[str] = set()
        if observer:
            observer.begin(list(self._left))

    def advance(self, nbytes: int) -> None:
        if self._observer:
            with self._lock:
                self._observer.advanced(nbytes)

    def start(self, check: Check[R]) -> Check[R]:
        if self._observer and check.unit not in self._started:
            self._started.add(check.unit)
            with self._lock:
                self._observer.unit_started(check.unit)
        return check

    def finish(self, unit: str) -> None:
        """Of the checks of a unit, one more is."""
        self._left[unit] -= 1
        if self._observer and not self._left[unit]:
            with self._lock:
                self._observer.unit_finished(unit)
