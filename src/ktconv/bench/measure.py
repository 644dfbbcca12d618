"""Timing one layer: proven right first, then iterations on fresh routing."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv.bench.rows import Sample
from ktconv.errors import VerificationError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.moe import Experts
from ktconv.native import Pool

Array = NDArray[Any]

_WARM_UP = 2
_LEAST_ITERATIONS, _PATIENCE = 5, 10  # the latter: times --seconds before giving up on more
_KEPT_IDS = 1 << 22  # ids drawn before timing starts, at most
_CHECKED_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a row is measured: `iterations` if given, else about `seconds`."""

    seconds: float = 0.7
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
    count = max(1, min(64, _KEPT_IDS // (tokens * top_k)))
    if effort.iterations:
        count = min(count, _WARM_UP + effort.iterations)
    return Batch(x, weights, list(islice(ids, count)))


def check(experts: Experts, batch: Batch, pool: Pool) -> float:
    """Relative error of a few tokens of the full batch against float32 arithmetic on the same
    weights. Raises VerificationError beyond the method's bound: a wrong kernel is not timed."""
    y = experts.forward(batch.x, batch.ids[0], batch.weights, pool)
    tokens = sorted({0, len(batch.x) - 1})[:_CHECKED_TOKENS]
    expected = experts.reference(batch.x[tokens], batch.ids[0][tokens], batch.weights[tokens])
    got = bf16_to_f32(y[tokens])
    norm = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(got - expected)) / max(norm, 1e-30)
    if not error <= experts.method.bound:
        raise VerificationError(
            f"the {experts.method.name} kernel is wrong: relative error {error:.2g} against "
            f"float32, at most {experts.method.bound:g} is right",
            "please report this with the output of ktconv doctor",
        )
    return error


def sample(experts: Experts, batch: Batch, pool: Pool, effort: Effort) -> Sample:
    """Iterations in turn on the batch's ids."""
    y = np.empty_like(batch.x)
    tokens, top_k = batch.weights.shape
    scratch = experts.layer.scratch(tokens, top_k, pool)
    calls = [experts.layer.call(pool, batch.x, ids, batch.weights, y, scratch) for ids in batch.ids]
    distinct = [len(np.unique(ids[ids >= 0])) for ids in batch.ids]
    for call in calls[:_WARM_UP] if effort.iterations is None else calls[:1]:
        call()
    times: list[float] = []
    stolen, start = _stolen_seconds(), time.perf_counter()
    while not _enough(times, time.perf_counter() - start, effort):
        call = calls[(len(times) + _WARM_UP) % len(calls)]
        before = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - before) / 1e9)
    elapsed = time.perf_counter() - start
    used = [distinct[(i + _WARM_UP) % len(calls)] for i in range(len(times))]
    taken = (_stolen_seconds() - stolen) / max(elapsed * pool.threads, 1e-9)
    return Sample(tuple(times), float(np.mean(used)), taken)


def _enough(times: list[float], elapsed: float, effort: Effort) -> bool:
    if effort.iterations:
        return len(times) >= effort.iterations
    if elapsed < effort.seconds or not times:
        return False
    return len(times) >= _LEAST_ITERATIONS or elapsed >= _PATIENCE * effort.seconds


def _stolen_seconds() -> float:
    """CPU time that the hypervisor gave to others, and a tick for each time that this process
    had to make room for another."""
    switched = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw * 1e-3
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return switched + int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return switched
