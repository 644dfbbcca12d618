"""Inside a peer's process: build the layer, prove it, time it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from ktconv.bench.measure import Batch, Effort, make_batch
from ktconv.bench.peers.base import Array, Layer, Peer, PeerError, Steps, reference
from ktconv.bench.peers.request import Request, Result
from ktconv.bench.peers.table import PEERS
from ktconv.bench.routing import parse_routing
from ktconv.bench.weights import RandomWeights
from ktconv.moe.experts import Matrices

BOUND = 0.1  # of the relative error: a peer beyond it computes something else
_WARM_UP, _LEAST_ITERATIONS, _PATIENCE = 2, 5, 10


def work(request: Request) -> Iterator[Result]:
    """Raises PeerError for a peer that cannot be loaded, cannot hold the layer, or is wrong."""
    shape = request.shape
    source = RandomWeights(request.seed, shape.hidden, shape.intermediate)
    origins = [index % request.different for index in range(shape.experts)]
    peer = PEERS[request.peer].make()
    peer.prepare(Layer(shape, origins, source.expert, request.threads, max(request.tokens)))
    routing = parse_routing(request.routing)
    for tokens in request.tokens:
        ids = routing.iterations(tokens, shape.experts, shape.top_k, request.seed)
        batch = make_batch(ids, tokens, shape.hidden, shape.top_k, request.seed, request.effort)
        yield _measure(peer, batch, request, source, origins)
    peer.close()


def _measure(
    peer: Peer, batch: Batch, request: Request, source: RandomWeights, origins: list[int]
) -> Result:
    steps = peer.steps(batch)
    steps.calls[0]()
    tokens = sorted({0, len(batch.x) // 2, len(batch.x) - 1})
    got = steps.result()[tokens]
    values, before = cache(peer.values), cache(source.expert)
    error, source_error = (
        _relative(got, _expected(request, batch, tokens, origins, matrices))
        for matrices in (values, before)
    )
    if not error <= BOUND:
        raise PeerError(f"its result is wrong here: relative error {error:.2g} against float32")
    seconds = _time(steps, request.effort)
    used = [batch.ids[_turn(i, batch)] for i in range(min(len(seconds), len(batch.ids)))]
    return Result(
        tokens=len(batch.x),
        seconds=seconds,
        pairs=float(np.mean([np.count_nonzero(ids >= 0) for ids in used])),
        distinct=float(np.mean([len(np.unique(ids[ids >= 0])) for ids in used])),
        expert_bytes=peer.expert_bytes(),
        relative_error=error,
        source_error=source_error,
        detail=str(getattr(peer, "layout", "")),
    )


def _expected(
    request: Request,
    batch: Batch,
    tokens: list[int],
    origins: list[int],
    matrices: Callable[[int], Matrices],
) -> Array:
    return reference(
        request.shape.activation, lambda expert: matrices(origins[expert]), batch, tokens
    )


def _relative(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30)


def _time(steps: Steps, effort: Effort) -> tuple[float, ...]:
    """Like our own rows: iterations in turn on the batch's routings."""
    for call in steps.calls[1:_WARM_UP]:  # the first was checked
        call()
    times: list[float] = []
    start = time.perf_counter()
    while not _enough(len(times), time.perf_counter() - start, effort):
        call = steps.calls[(len(times) + _WARM_UP) % len(steps.calls)]
        before = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - before) / 1e9)
    return tuple(times)


def _turn(iteration: int, batch: Batch) -> int:
    return (iteration + _WARM_UP) % len(batch.ids)


def _enough(count: int, elapsed: float, effort: Effort) -> bool:
    if effort.iterations:
        return count >= effort.iterations
    if count < _LEAST_ITERATIONS and elapsed < _PATIENCE * effort.seconds:
        return False
    return count > 0 and elapsed >= effort.seconds
