"""Inside a peer's process: build the layer, check its gradients, take turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import torch
from msgspec.structs import asdict

from ktconv.bench.limits import settle
from ktconv.bench.peers.base import PeerError, is_plain
from ktconv.bench.routing import parse_routing
from ktconv.bench.sft.inputs import make_inputs
from ktconv.bench.sft.peers.request import Ready, Request
from ktconv.bench.sft.peers.table import PEERS
from ktconv.bench.sft.steps import turn
from ktconv.bench.weights import RandomWeights
from ktconv.formats import FORMATS
from ktconv.runtime.layers.experts import quantized
from ktconv.source.reading.streamed import whole
from ktconv.train.gradients import base_of, errors, expected
from ktconv.train.reference import Base, KernelRounding

WRONG = 0.1  # an error beyond it: the peer computes something else


def work(request: Request, turns: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Ready, then the Times of each turn; `turns` are numbers of steps. Raises PeerError if the
    peer cannot be loaded, does not support the layer, or is wrong."""
    spec, shape = PEERS[request.peer], request.shape
    if not is_plain(shape.activation):
        raise PeerError("only plain SwiGLU is compared")
    torch.set_num_threads(request.threads)
    routing = parse_routing(request.routing)
    drawn = routing.iterations(request.tokens, shape.experts, shape.top_k, request.seed)
    inputs = make_inputs(drawn, request.tokens, shape, shape.experts, request.rank, request.seed)
    source = RandomWeights(request.seed, shape.hidden, shape.intermediate)
    origins = [index % request.different for index in range(shape.experts)]
    experts = [source.expert(origin) for origin in origins]

    def base(expert: int) -> Base:
        gate, up, down = (quantized(FORMATS[spec.method], one).values for one in experts[expert])
        return base_of((whole(gate), whole(up), whole(down)))

    # First, as some peers change how the process rounds.
    only_stored = KernelRounding(activation=shape.activation, rounding="none", group=0, parts=1)
    right = expected(inputs.call, base, only_stored)
    trained = spec.make(experts, inputs.call, request.threads)
    ids = cycle(inputs.ids)
    turn(trained, ids, 1)
    found = errors(trained.found(), right)
    _expect_right(found)
    yield asdict(Ready(found, trained.saved_bytes, trained.scratch_bytes))
    for steps in turns:
        yield asdict(turn(trained, ids, int(steps)))
        settle()


def _expect_right(found: dict[str, float]) -> None:
    for name, error in found.items():
        if not error <= WRONG:
            raise PeerError(f"its {name} is wrong here: relative error {error:.2g} against float32")
