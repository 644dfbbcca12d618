"""A step is a forward that saves what its backward needs, and that backward; turns of steps are
timed so that what disturbs the machine meets every implementation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from msgspec import Struct, field
from torch import Tensor

from ktconv.bench.measure import Effort
from ktconv.bench.peers.base import PeerError
from ktconv.train.gradients import Found

STEPS_OF_TURN = 3  # the first of them with cold caches
_LEAST_TURNS, _PATIENCE = 4, 10  # the latter: times --seconds before giving up on more


class Trained(Protocol):
    """A layer with LoRA, bound to a call but for its ids."""

    saved_bytes: int | None  # that the forward leaves for the backward, where it is known
    scratch_bytes: int | None

    def forward(self, ids: Tensor) -> None: ...

    def backward(self) -> None:
        """Run the backward of the last forward."""

    def found(self) -> Found:
        """Result and gradients of the last step."""


class Times(Struct):
    """Seconds of each step."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def __iadd__(self, other: Times) -> Times:
        self.forward += other.forward
        self.backward += other.backward
        return self

    @property
    def total(self) -> float:
        return sum(self.forward) + sum(self.backward)


def turn(trained: Trained, ids: Iterator[Tensor], steps: int) -> Times:
    """Times of a number of steps, on the next routings of `ids`."""
    times = Times()
    for chosen in islice(ids, steps):
        start = time.perf_counter()
        trained.forward(chosen)
        middle = time.perf_counter()
        trained.backward()
        times.forward.append(middle - start)
        times.backward.append(time.perf_counter() - middle)
    return times


class Runner(Protocol):
    """Who takes turns: a layer in this process, or the process of a peer."""

    def turn(self, steps: int) -> Times:
        """PeerError if the process has ended."""


def in_turn(runners: Sequence[Runner], effort: Effort) -> list[Times | PeerError]:
    """Times of all runners, which take turns until each has had its time or its iterations; for a
    peer that ends on the way why it did."""
    found: list[Times | PeerError] = [Times() for _ in runners]
    if effort.iterations:
        sizes = [STEPS_OF_TURN] * (effort.iterations // STEPS_OF_TURN)
        sizes += [rest] if (rest := effort.iterations % STEPS_OF_TURN) else []
        for steps in sizes:
            _round(runners, found, steps)
        return found
    turns = 0
    while not _enough(turns, found, effort.seconds):
        _round(runners, found, STEPS_OF_TURN)
        turns += 1
    return found


def _round(runners: Sequence[Runner], found: list[Times | PeerError], steps: int) -> None:
    for index, runner in enumerate(runners):
        times = found[index]
        if isinstance(times, Times):
            try:
                times += runner.turn(steps)
            except PeerError as error:
                found[index] = error


def _enough(turns: int, found: Sequence[Times | PeerError], seconds: float) -> bool:
    """Whether turns are enough: of those that still take part, the one with the least time
    decides."""
    measured = min((one.total for one in found if isinstance(one, Times)), default=seconds)
    if not turns or measured < seconds:
        return False
    return turns >= _LEAST_TURNS or measured >= _PATIENCE * seconds
