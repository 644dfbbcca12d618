"""Timing one layer: proven right first, then iterations on fresh routing."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv.bench.rows import Errors, Sample
from ktconv.errors import VerificationError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.moe import KERNEL_BOUND, Experts
from ktconv.native import Pool

Array = NDArray[Any]

WARM_UP = 2
_LEAST_ITERATIONS, _PATIENCE = 5, 10  # the latter: times --seconds before giving up on more
_MOST_ROUTINGS, _KEPT_IDS = 512, 1 << 21  # drawn before timing starts
_CHECKED_TOKENS = 3
_TICKS = 2  # of /proc/stat: less is rounding


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a row is measured: `iterations` if given, else about `seconds`."""

    seconds: float = 0.5
    iterations: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one row: tokens, and where they go in each iteration."""

    x: Array
    weights: Array
    ids: list[Array]


def make_batch(
    ids: Iterator[Array], tokens: int, hidden: int, top_k: int, seed: int, effort: Effort
) -> Batch:
    rng = np.random.default_rng(seed)
    x = f32_to_bf16(rng.standard_normal((tokens, hidden), np.float32))
    weights = rng.random((tokens, top_k), np.float32)
    weights /= weights.sum(axis=1, keepdims=True)
    count = max(1, min(_MOST_ROUTINGS, _KEPT_IDS // (tokens * top_k)))
    if effort.iterations:
        count = min(count, WARM_UP + effort.iterations)
    return Batch(x, weights, list(islice(ids, count)))


class Truth:
    """What a few tokens of a batch's first iteration should give, in float32."""

    def __init__(self, experts: Experts, batch: Batch) -> None:
        self._experts = experts
        last = len(batch.x) - 1
        self.tokens = sorted({last * i // (_CHECKED_TOKENS - 1) for i in range(_CHECKED_TOKENS)})
        self._inputs = (batch.x[self.tokens], batch.ids[0][self.tokens], batch.weights[self.tokens])

    @cached_property
    def rounded(self) -> Array:
        """With activations rounded as the kernels round them: what is left is next to nothing."""
        return self._experts.reference(*self._inputs, rounded=True)

    @cached_property
    def packed(self) -> Array:
        """On the packed weights' values, activations as they are."""
        return self._experts.reference(*self._inputs)

    @cached_property
    def source(self) -> Array | None:
        """On the weights before quantization, where they are known."""
        if self._experts.source is None:
            return None
        return self._experts.reference(*self._inputs, self._experts.source)


def check(experts: Experts, batch: Batch, truth: Truth, pool: Pool) -> Errors:
    """Raises VerificationError if the kernel is wrong: then it is not timed."""
    y = bf16_to_f32(experts.forward(batch.x, batch.ids[0], batch.weights, pool)[truth.tokens])
    error = relative_error(y, truth.rounded)
    if not error <= KERNEL_BOUND:
        raise VerificationError(
            f"the {experts.method.name} kernel is wrong: relative error {error:.2g} against "
            f"float32, at most {KERNEL_BOUND:g} is right",
            "please report this with the output of ktconv doctor",
        )
    source = None if truth.source is None else relative_error(y, truth.source)
    return Errors(relative_error(y, truth.packed), source, error)


def relative_error(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30)


def sample(experts: Experts, batch: Batch, pool: Pool, effort: Effort) -> Sample:
    """Iterations in turn on the batch's ids. Only the C call is timed."""
    y = np.empty_like(batch.x)
    tokens, top_k = batch.weights.shape
    scratch = experts.layer.scratch(tokens, top_k, pool)
    calls = [experts.layer.call(pool, batch.x, ids, batch.weights, y, scratch) for ids in batch.ids]
    for call in calls[:WARM_UP] if effort.iterations is None else calls[:1]:
        call()
    others = _Others()
    times = timed(calls, effort)
    taken = others.share()
    pairs, distinct = routed(batch, len(times))
    return Sample(times, pairs, distinct, taken)


def timed(calls: Sequence[Callable[[], None]], effort: Effort) -> tuple[float, ...]:
    """Seconds of each iteration; call i of n is the one with the batch's ids i."""
    times: list[float] = []
    start = time.perf_counter()
    while not _enough(len(times), time.perf_counter() - start, effort):
        call = calls[_turn(len(times), len(calls))]
        before = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - before) / 1e9)
    return tuple(times)


def routed(batch: Batch, iterations: int) -> tuple[float, float]:
    """Means over the iterations of `timed`: pairs of token and expert, distinct experts."""
    used = [batch.ids[_turn(i, len(batch.ids))] for i in range(min(iterations, len(batch.ids)))]
    pairs = float(np.mean([np.count_nonzero(ids >= 0) for ids in used]))
    distinct = float(np.mean([len(np.unique(ids[ids >= 0])) for ids in used]))
    return pairs, distinct


def _turn(iteration: int, routings: int) -> int:
    return (iteration + WARM_UP) % routings


def _enough(count: int, elapsed: float, effort: Effort) -> bool:
    if effort.iterations:
        return count >= effort.iterations
    if elapsed < effort.seconds or not count:
        return False
    return count >= _LEAST_ITERATIONS or elapsed >= _PATIENCE * effort.seconds


class _Others:
    """CPU time that is not this process's, from now on: other processes' and other machines'."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Of the time of all CPUs; 0 where the system does not tell, or in doubt."""
        elapsed = time.perf_counter() - self._start
        taken = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        if taken <= _TICKS / os.sysconf("SC_CLK_TCK"):
            return 0.0
        return taken / max(elapsed * (os.cpu_count() or 1), 1e-9)


def _busy_seconds() -> float:
    """Of all CPUs, with what the hypervisor gave to other machines."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, soft, steal = (int(field) for field in fields[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
