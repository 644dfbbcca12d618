"""Inside a peer's process: build the layer, check its result, time it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from msgspec.structs import replace

from ktconv.bench.measure import (
    WARM_UP,
    Batch,
    checked_tokens,
    make_batch,
    relative_error,
    routed,
    timed,
)
from ktconv.bench.peers.base import Layer, Peer, PeerError, reference
from ktconv.bench.peers.request import Request, Result
from ktconv.bench.peers.table import PEERS
from ktconv.bench.routing import parse_routing
from ktconv.bench.weights import RandomWeights
from ktconv.runtime.layers.experts import GatedMatrices

BOUND = 0.1  # of the relative error: a peer beyond it computes something else


def work(request: Request) -> Iterator[Result]:
    """Raises PeerError if the peer cannot be loaded, does not support the layer, or is wrong."""
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
    steps.calls[batch.checked]()
    result = steps.result()
    if not np.isfinite(result).all():
        raise PeerError("its result is wrong here: it contains NaN or infinity")
    ids = batch.ids[batch.checked]
    tokens = checked_tokens(np.where(ids >= 0, np.array(origins)[ids], -1), request.different)
    seen = replace(batch, ids=[ids])

    def error_against(matrices: Callable[[int], GatedMatrices]) -> float:
        expected = reference(
            request.shape.activation, lambda expert: matrices(origins[expert]), seen, tokens
        )
        return relative_error(result[tokens], expected)

    error, source_error = error_against(cache(peer.values)), error_against(cache(source.expert))
    if not error <= BOUND:
        raise PeerError(f"its result is wrong here: relative error {error:.2g} against float32")
    for call in steps.calls[1:WARM_UP]:  # one was checked
        call()
    seconds = timed(steps.calls, request.effort)
    pairs, distinct = routed(batch, len(seconds))
    return Result(
        tokens=len(batch.x),
        seconds=seconds,
        pairs=pairs,
        distinct=distinct,
        expert_bytes=peer.expert_bytes(),
        relative_error=error,
        source_error=source_error,
        detail=str(getattr(peer, "detail", "")),
    )
