"""Limits of the machine: measured with the same threads, before and after each row.

A machine that others share can have half the bandwidth a minute later; a share of a limit
means something only if both were measured together.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.bench.fingerprint import largest_cache
from ktconv.system import machine
from ktconv.system.arrays import Array
from ktconv.system.machine import usable_cores
from ktconv.system.nodes import nodes
from ktconv.system.pool import Pool

_CACHES, _LEAST_BYTES, _MOST_BYTES = 6, 192 << 20, 2 << 30
_PIECE = 32 << 20  # bytes filled at once: pages of new memory can cost the system 10 s per GiB
_READ_PIECE = 1 << 20  # bytes: kt_limit_read's
_MOVED = 0.95  # of the pages of memory that is to be on a node
_STREAMS = (1, 2, 4, 8, 16)
_REPEATS, _AGAIN = 4, 2  # of each loop at first, and around a row
_CLOCK = 1e-9  # seconds: the clock of an emulated machine may have the same time after the work
_SETTLE_SLICE = 0.01  # seconds of waiting at a time
_IDLE = 0.05  # of one core's time


class Limits(Struct, frozen=True):
    """Limits with all threads of a pool, at one level."""

    threads: int
    isa: str
    read_gb_s: float
    int8_gops: float
    bf16_gflops: float

    def peak(self, unit: str) -> float:
        """10^9 operations per second of "int8" or "bf16"."""
        return self.int8_gops if unit == "int8" else self.bf16_gflops

    def best(self, other: Limits) -> Limits:
        """The higher of each limit."""
        return Limits(
            self.threads,
            self.isa,
            max(self.read_gb_s, other.read_gb_s),
            max(self.int8_gops, other.int8_gops),
            max(self.bf16_gflops, other.bf16_gflops),
        )

    def drift(self, other: Limits, unit: str) -> float:
        """The larger factor by which memory or the unit differ between two measurements."""
        pairs = ((self.read_gb_s, other.read_gb_s), (self.peak(unit), other.peak(unit)))
        return max(max(pair) / max(min(pair), 1e-9) for pair in pairs)


class NodeReads(Struct, frozen=True):
    """Limits of reading between NUMA nodes, by the system's numbers of the nodes as text."""

    threads: dict[str, int]  # of each node, with which it reads
    read_gb_s: dict[str, dict[str, float | None]]  # by their node, then by that of the memory

    @property
    def remote_share(self) -> float | None:
        """The slowest read of another node's memory over the same node's read of its own; None
        where nothing could be measured."""
        found = [
            rate / own
            for node, rates in self.read_gb_s.items()
            if (own := rates.get(node))
            for memory, rate in rates.items()
            if memory != node and rate
        ]
        return min(found, default=None)


@contextmanager
def level_kept() -> Iterator[None]:
    """The level in use is the same at the end."""
    before = native.isa()
    try:
        yield
    finally:
        native.use_isa(before)


def read_size() -> int:
    """Bytes to read: several times the size of the caches."""
    size = _CACHES * largest_cache() >> 20 << 20
    return min(max(size, _LEAST_BYTES), _MOST_BYTES)


class Meter:
    """Measures limits at the level in use; keeps the best of each (level, threads).

    `dot_seconds` is how long a loop of products runs at least, at first and around a row.
    """

    def __init__(
        self, read_bytes: int | None = None, dot_seconds: tuple[float, float] = (0.02, 0.005)
    ) -> None:
        self._first_seconds, self._again_seconds = dot_seconds
        self._memory = _filled(read_bytes or read_size())
        self._streams: dict[int, int] = {}  # threads -> the number that was fastest
        self._cut: list[tuple[int, int, int]] = []  # memory on nodes: begin, end and node
        self.found: dict[tuple[str, int], Limits] = {}

    def measure(self, pool: Pool) -> Limits:
        """The limits of `pool`, measured thoroughly: the best of several repeats."""
        settle()
        self._place(_read_by(pool, self._memory.nbytes))
        times = {
            streams: _best(partial(native.limit_read, pool, self._memory, streams), _REPEATS)
            for streams in _STREAMS
        }
        self._streams[pool.threads] = min(times, key=lambda streams: times[streams])
        rates = (_dot_rate(pool, unit, _REPEATS, self._first_seconds) for unit in native.UNITS)
        return self._keep(pool, min(times.values()), *rates)

    def again(self, pool: Pool) -> Limits:
        """The limits once more, measured quickly right before or after a row."""
        settle()
        self._place(_read_by(pool, self._memory.nbytes))
        streams = self._streams.get(pool.threads, _STREAMS[0])
        read = _best(partial(native.limit_read, pool, self._memory, streams), _AGAIN)
        rates = (_dot_rate(pool, unit, _AGAIN, self._again_seconds) for unit in native.UNITS)
        return self._keep(pool, read, *rates)

    def between_nodes(self, threads: int) -> NodeReads | None:
        """Reading each NUMA node's memory from the threads of each node, up to `threads` of them;
        None on a machine with one node."""
        cpus = machine.topology()
        from_nodes = sorted({cpu.node for cpu in cpus})
        may = machine.allowed_memory()
        of_nodes = [one for one in nodes() if one.total and (not may or one.number in may)]
        if len(from_nodes) < 2:
            return None
        rates: dict[str, dict[str, float | None]] = {str(node): {} for node in from_nodes}
        with ExitStack() as stack:
            pools = {
                node: stack.enter_context(
                    Pool(min(threads, usable_cores([c for c in cpus if c.node == node])), [node])
                )
                for node in from_nodes
            }
            for memory in of_nodes:
                there = memory.available > self._memory.nbytes and self._moved(memory.number)
                for node, pool in pools.items():
                    rate = self._read_rate(pool) if there else None
                    rates[str(node)][str(memory.number)] = rate
            self._place([(0, self._memory.nbytes, from_nodes[0])])  # for threads without a place
            return NodeReads({str(node): pool.threads for node, pool in pools.items()}, rates)

    def _read_rate(self, pool: Pool) -> float:
        """10^9 bytes a second, with the best number of streams."""
        settle()
        reads = (partial(native.limit_read, pool, self._memory, streams) for streams in _STREAMS)
        return self._memory.nbytes / min(_best(read, _AGAIN) for read in reads) / 1e9

    def _moved(self, node: int) -> bool:
        """Puts all of the memory on a node; False where the system does not do it."""
        self._place([(0, self._memory.nbytes, node)])
        found = native.pages_by_node(native.Ranges([self._memory]), node + 1)
        return found is not None and found[0][node] >= _MOVED * (sum(found[0]) + found[1])

    def _place(self, cut: list[tuple[int, int, int]]) -> None:
        """Moves pieces of the memory to their nodes, as far as the system does it."""
        if cut and cut != self._cut:
            for begin, end, node in cut:
                native.bind_memory(self._memory[begin:end], node)
            self._cut = cut

    def best(self, pool: Pool) -> Limits:
        """The best limits of the run so far, at the level in use."""
        return self.found[native.isa(), pool.threads]

    def _keep(self, pool: Pool, read: float, int8: float, bf16: float) -> Limits:
        rate = self._memory.nbytes / read / 1e9
        limits = Limits(pool.threads, native.isa(), rate, int8, bf16)
        before = self.found.get((limits.isa, limits.threads), limits)
        self.found[limits.isa, limits.threads] = limits.best(before)
        return limits


def _read_by(pool: Pool, nbytes: int) -> list[tuple[int, int, int]]:
    """The piece that threads of each node read of `nbytes`, see kt_limit_read: begin, end and the
    system's number of the node. Nothing where threads are not placed."""
    pieces, cut, first = nbytes // _READ_PIECE, [], 0
    for node, count in zip(pool.os_nodes, pool.threads_of, strict=True) if pool.placed else ():
        begin, end = (pieces * one // pool.threads for one in (first, first + count))
        cut.append((begin * _READ_PIECE, end * _READ_PIECE, node))
        first += count
    return cut


def _filled(nbytes: int) -> Array:
    """`nbytes` of memory, written once, so that each of its pages exists. Filled piece by
    piece, because Python raises an interrupt only between two calls."""
    memory = native.aligned_bytes(nbytes)
    numbers = memory.view(np.uint64)
    step = _PIECE // numbers.itemsize
    for start in range(0, len(numbers), step):
        numbers[start : start + step] = 0x9E3779B97F4A7C15
    return memory


def settle(at_most: float = 1.0) -> None:
    """Wait until no thread of this process computes: those of NumPy's BLAS keep spinning for a
    tenth of a second after a product, and would take a core from the next measurement."""
    end = time.perf_counter() + at_most
    while (start := time.perf_counter()) < end:
        used = own_seconds()
        time.sleep(_SETTLE_SLICE)
        if own_seconds() - used < _IDLE * (time.perf_counter() - start):
            return


def own_seconds() -> float:
    """CPU time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _dot_rate(pool: Pool, unit: str, repeats: int, seconds: float) -> float:
    rounds = 64
    while (taken := _seconds(partial(native.limit_dot, pool, unit, rounds))) < seconds:
        rounds = max(2 * rounds, int(rounds * seconds / max(taken, 1e-6)) + 1)
    best = _best(partial(native.limit_dot, pool, unit, rounds), repeats)
    return rounds * native.limit_ops() * pool.threads / best / 1e9


def _best(work: Callable[[], None], repeats: int) -> float:
    return min(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, _CLOCK)
