"""Experts decoded by threads, ahead of the one that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

from ktconv.source import ExpertMatrix, MoELayer
from ktconv.source.reading.matrices import source_bytes, spans_of
from ktconv.source.reading.reader import advise

# Of the source, beyond the experts that are decoded: a disk is fast with as much to do.
ADVISED_BYTES = 64 << 20
# Of the next layer, while the last experts of this one run and its attention follows.
NEXT_LAYER_BYTES = 512 << 20

Slot = TypeVar("Slot")


class Ahead(Generic[Slot]):
    """Fills `slots` in turn by threads, each with what comes next; `fill` gets a slot and the
    number of what is to be put into it."""

    def __init__(self, slots: Sequence[Slot], fill: Callable[[Slot, int], None]) -> None:
        self._slots, self._fill = slots, fill

    @contextmanager
    def filled(
        self, count: int, threads: int, last: Callable[[], None]
    ) -> Iterator[Iterator[Slot]]:
        """The slots with numbers from 0 on; one is filled again when the next one is asked for.

        Errors of `fill` come out of the iterator. `last` is called in a thread when nothing is
        left to fill. At the end no thread is left, whatever happened.
        """
        pool = ThreadPoolExecutor(threads, "ktconv-expert")
        failed = True
        try:
            yield self._in_turn(pool, count, last)
            failed = False
        finally:
            pool.shutdown(wait=True, cancel_futures=failed)  # else `last` is still to come

    def _in_turn(
        self, pool: ThreadPoolExecutor, count: int, last: Callable[[], None]
    ) -> Iterator[Slot]:
        waiting: list[Future[None]] = []

        def submit(number: int) -> None:
            if number < count:
                slot = self._slots[number % len(self._slots)]
                waiting.append(pool.submit(self._fill, slot, number))
            elif number == count:
                pool.submit(last)

        for number in range(len(self._slots)):
            submit(number)
        for number in range(count):
            waiting.pop(0).result()
            yield self._slots[number % len(self._slots)]
            submit(number + len(self._slots))


class Advice:
    """Tells the system which experts are read next, so that it reads them meanwhile. Only a hint:
    where it fails, they are read when they are needed, and errors are found then."""

    def __init__(self, experts: Iterable[Iterable[ExpertMatrix]]) -> None:
        self._left = iter(experts)
        self._given: list[int] = []  # bytes of each expert, the sum of all before included
        self._lock = Lock()

    def upto(self, number: int, beyond: int) -> None:
        """Ask for the experts up to `number` (from 0 on), and a number of bytes behind it."""
        with self._lock:
            while len(self._given) <= number or self._given[-1] < self._given[number] + beyond:
                matrices = next(self._left, None)
                if matrices is None:
                    return
                found = list(matrices)
                advise([span for matrix in found for span in spans_of(matrix)])
                before = self._given[-1] if self._given else 0
                self._given.append(before + sum(map(source_bytes, found)))


def advise_layer(layer: MoELayer) -> None:
    """Ask the system to read the first experts of a layer."""
    Advice(expert.values() for expert in layer.experts).upto(0, NEXT_LAYER_BYTES)
