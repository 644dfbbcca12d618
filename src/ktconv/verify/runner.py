"""Runs checks in worker threads, in one pass over the bytes."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from ktconv.conversion.pipeline import Observer
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.reader import Span, advise

T = TypeVar("T")
R = TypeVar("R")
Found = TypeVar("Found", covariant=True)
Advance = Callable[[int], None]


class Check(Protocol[Found]):
    """Something to read and check: a matrix or a copied tensor."""

    @property
    def unit(self) -> str:
        """The unit of progress that it belongs to, such as a layer."""

    @property
    def nbytes(self) -> int:
        """Bytes that it reports as progress."""

    def spans(self) -> Sequence[Span]:
        """Spans of the source that will be read, in order; other files are not read ahead."""

    def run(self, buffers: Buffers, advance: Advance) -> Found: ...


ADVISE_AHEAD = 64 << 20  # bytes: less, and more is asked for, up to twice as much
OTHER = "other"  # the unit of non-expert tensors


def unit_of(layer: int) -> str:
    """The unit of progress of a layer, as conversions call it."""
    return f"layer-{layer:05d}"


def sizes_by_unit(checks: Iterable[Check[R]]) -> dict[str, int]:
    """Bytes of progress of each unit."""
    sizes: Counter[str] = Counter()
    for check in checks:
        sizes[check.unit] += check.nbytes
    return dict(sizes)


def run_checks(
    checks: Sequence[Check[R]], sizes: BufferSizes, threads: int, observer: Observer | None
) -> Iterator[R]:
    """Results in the order of the checks. Each thread has its own buffers. The first error is
    raised."""
    local, progress = threading.local(), Progress((check.unit for check in checks), observer)

    def run(check: Check[R]) -> R:
        if not hasattr(local, "buffers"):
            local.buffers = Buffers(sizes)
        return check.run(local.buffers, progress.advance)

    def started() -> Iterator[Check[R]]:
        for check in _advised(checks):
            progress.start(check.unit)
            yield check

    for check, found in zip(checks, in_order(run, started(), threads, 2 * threads), strict=True):
        progress.finish(check.unit)
        yield found


def _advised(checks: Sequence[Check[R]]) -> Iterator[Check[R]]:
    """The checks, while what those behind them will read is read ahead."""
    ahead, behind = 0, iter(checks)  # bytes that are asked for and not yet about to be read
    sizes: deque[int] = deque()
    for check in checks:
        wanted: list[Span] = []
        if ahead < ADVISE_AHEAD:
            for following in behind:
                spans = following.spans()
                sizes.append(sum(span.nbytes for span in spans))
                wanted += spans
                ahead += sizes[-1]
                if ahead >= 2 * ADVISE_AHEAD:
                    break
        advise(wanted)
        yield check
        ahead -= sizes.popleft()


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Iterator[R]:
    """Results in the order of the items, `ahead` of which run or wait. Raises the first error."""
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


class Progress:
    """Reports to an observer, if there is one, on units whose checks come one after the other."""

    def __init__(self, units: Iterable[str], observer: Observer | None) -> None:
        self._observer, self._lock = observer or Observer(), threading.Lock()
        self._left = Counter(units)  # checks by unit
        self._started: set[str] = set()
        self._observer.begin(list(self._left))

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._observer.advanced(nbytes)

    def start(self, unit: str) -> None:
        """A check of a unit begins."""
        if unit not in self._started:
            self._started.add(unit)
            with self._lock:
                self._observer.unit_started(unit)

    def finish(self, unit: str) -> None:
        """A check of a unit is done."""
        self._left[unit] -= 1
        if not self._left[unit]:
            with self._lock:
                self._observer.unit_finished(unit)
