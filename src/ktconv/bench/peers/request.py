"""Requests to a peer's process and its results, which travel as JSON of their fields."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ktconv.bench.measure import Effort
from ktconv.bench.presets import Shape


class Request(Struct, frozen=True):
    """One peer, one layer, one number of threads. Weights, tokens and routings follow from the
    seed, so that they are those of our own rows."""

    peer: str
    shape: Shape
    routing: str  # as parse_routing reads it
    tokens: tuple[int, ...]
    threads: int
    effort: Effort
    seed: int = 0
    different: int = 4  # experts with weights of their own; the others are copies of them


class Result(Struct, frozen=True):
    """Times of a peer for one number of tokens."""

    tokens: int
    seconds: Sequence[float]  # of each iteration
    pairs: float  # (token, expert) pairs per iteration, on average
    distinct: float  # experts per iteration that had tokens, on average
    expert_bytes: int
    relative_error: float  # against float32 on the peer's own quantized weights
    source_error: float  # against float32 on the weights before quantization
    detail: str = ""  # which of its builds runs, or how it stores weights, where that has a name
