"""Requests to a peer's process and its results, as JSON of their fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ktconv.bench.measure import Effort
from ktconv.bench.presets import Shape
from ktconv.native import Activation


def facts_of(text: str) -> dict[str, Any]:
    """The fields of a request in JSON, with its shape."""
    facts: dict[str, Any] = json.loads(text)
    activation = Activation(**facts["shape"].pop("activation"))
    return facts | {"shape": Shape(**facts["shape"], activation=activation)}


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

    @classmethod
    def from_json(cls, text: str) -> Request:
        facts = facts_of(text)
        facts["effort"] = Effort(**facts["effort"])
        facts["tokens"] = tuple(facts["tokens"])
        return cls(**facts)


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
