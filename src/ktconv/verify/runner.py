"""All items of a verification through worker threads, in one pass over the bytes."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ktconv.conversion.pipeline import Observer
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.verify.totals import ItemResult, Totals


class Item(Protocol):
    """Something to read and check: a matrix, or a tensor that was copied."""

    @property
    def unit(self) -> str:
        """What it counts to for progress: a layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of progress."""

    def run(self, buffers: Buffers, advance: Callable[[int], None]) -> ItemResult: ...


def read_everything(
    items: Sequence[Item], sizes: BufferSizes, threads: int, observer: Observer | None
) -> Totals:
    """All items, by threads with buffers of their own. The first error ends it."""
    totals = Totals()
    progress = _Progress(items, observer)
    work = _Worker(lambda: Buffers(sizes), progress.advance)
    with ThreadPoolExecutor(threads) as pool:
        running = []
        try:
            for item in items:
                progress.start(item)
                running.append(pool.submit(work, item))
                if len(running) >= 2 * threads:
                    progress.finish(running.pop(0).result(), totals)
            for future in running:
                progress.finish(future.result(), totals)
        except BaseException:
            work.stopped = True
            pool.shutdown(cancel_futures=True)
            raise
    return totals


class _Worker:
    """Runs items in pool threads; buffers stay with their thread."""

    def __init__(self, make: Callable[[], Buffers], advance: Callable[[int], None]) -> None:
        self._make, self._advance = make, advance
        self._local = threading.local()
        self.stopped = False

    def __call__(self, item: Item) -> ItemResult:
        if self.stopped:
            return ItemResult(0)
        if not hasattr(self._local, "buffers"):
            self._local.buffers = self._make()
        return item.run(self._local.buffers, self._advance)


class _Progress:
    """Tells an observer about units, whose items come one after the other."""

    def __init__(self, items: Sequence[Item], observer: Observer | None) -> None:
        self._observer, self._lock = observer, threading.Lock()
        self._left = Counter(item.unit for item in items)
        self._started: set[str] = set()
        self._order = deque(item.unit for item in items)
        if observer:
            observer.begin(list(self._left))

    def advance(self, nbytes: int) -> None:
        if self._observer:
            with self._lock:
                self._observer.advanced(nbytes)

    def start(self, item: Item) -> None:
        if self._observer and item.unit not in self._started:
            self._started.add(item.unit)
            with self._lock:
                self._observer.unit_started(item.unit)

    def finish(self, done: ItemResult, totals: Totals) -> None:
        """The oldest item that was not finished yet is."""
        totals.add(done)
        unit = self._order.popleft()
        self._left[unit] -= 1
        if self._observer and not self._left[unit]:
            with self._lock:
                self._observer.unit_finished(unit)
