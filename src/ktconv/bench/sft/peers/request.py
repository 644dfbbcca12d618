"""Requests to a peer's process and its results, which travel as JSON of their fields."""

from __future__ import annotations

from msgspec import Struct

from ktconv.bench.presets import Shape


class Request(Struct, frozen=True):
    """One peer and one call. Weights, LoRA matrices, tokens and routings follow from the seed, so
    that they are those of our own rows."""

    peer: str
    shape: Shape
    routing: str  # as parse_routing reads it
    tokens: int
    rank: int
    threads: int
    seed: int = 0
    different: int = 4  # experts with weights of their own; the others are copies of them


class Ready(Struct, frozen=True):
    """The first answer: the peer has been checked, and is warm."""

    errors: dict[str, float]  # by gradients.NAMES, against fp32 on the peer's own weights
    saved_bytes: int | None
    scratch_bytes: int | None
