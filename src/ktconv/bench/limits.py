"""What the machine can do at best: measured with the same threads, right before the rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from ktconv import native
from ktconv.native import Pool

_READ_BYTES = 512 << 20  # far beyond any last-level cache's share of a few cores
_REPEATS = 5
_DOT_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Limits:
    """With all threads of a pool, at one level."""

    threads: int
    isa: str
    read_gb_s: float
    int8_gops: float
    bf16_gflops: float

    def peak(self, unit: str) -> float:
        """10^9 operations per second of "int8" or "bf16"."""
        return self.int8_gops if unit == "int8" else self.bf16_gflops

    def facts(self) -> dict[str, object]:
        return asdict(self)


def measure_limits(pool: Pool, read_bytes: int = _READ_BYTES) -> Limits:
    """At the level in use. The best of a few, as a limit should be."""
    memory = native.aligned_bytes(read_bytes)
    memory.view(np.uint64)[:] = 0x9E3779B97F4A7C15
    read = _best(lambda: native.limit_read(pool, memory))
    return Limits(
        pool.threads,
        native.isa(),
        read_bytes / read / 1e9,
        _dot_rate(pool, "int8"),
        _dot_rate(pool, "bf16"),
    )


def _dot_rate(pool: Pool, unit: str) -> float:
    rounds = 64
    while (seconds := _seconds(partial(native.limit_dot, pool, unit, rounds))) < _DOT_SECONDS:
        rounds = max(2 * rounds, int(rounds * _DOT_SECONDS / max(seconds, 1e-6)) + 1)
    best = _best(partial(native.limit_dot, pool, unit, rounds))
    return rounds * native.limit_ops() * pool.threads / best / 1e9


def _best(work: Callable[[], None]) -> float:
    return min(_seconds(work) for _ in range(_REPEATS))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
