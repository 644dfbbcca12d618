"""Choice for each item, so that the sum of errors is small and the bytes fit.

Items are groups of matrices with one method, such as down of layer 3; a choice is a method with its
bytes and its error there. For each item only choices on the lower convex hull of error over bytes
can be part of the best result for some price of a byte; beginning with the smallest, the step that
saves the most error per byte is taken until none fits. What is left is then used by whatever choice
still fits, hull or not. The sum of errors exceeds the least possible one by no more than the step
that did not fit would have saved.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T", bound=Hashable)
C = TypeVar("C", bound=Hashable)


class Choice(Struct, Generic[C], frozen=True):
    what: C
    nbytes: int
    error: float


def smallest(items: Mapping[T, Sequence[Choice[C]]]) -> int:
    """The fewest bytes."""
    return sum(min(one.nbytes for one in choices) for choices in items.values())


def choose(items: Mapping[T, Sequence[Choice[C]]], budget: int) -> dict[T, Choice[C]]:
    """One choice for each item, of at most `budget` bytes together. ValueError if none fits."""
    hulls = {item: _hull(choices) for item, choices in items.items()}
    chosen = {item: hull[0] for item, hull in hulls.items()}
    left = budget - sum(one.nbytes for one in chosen.values())
    if left < 0:
        raise ValueError("not even the smallest choices fit")
    order = {item: number for number, item in enumerate(items)}
    steps: list[tuple[float, int, int]] = []  # minus what a byte saves, item, place in its hull
    names = list(items)

    def offer(item: T, place: int) -> None:
        hull = hulls[item]
        if place < len(hull):
            before, after = hull[place - 1], hull[place]
            saved = (before.error - after.error) / (after.nbytes - before.nbytes)
            heapq.heappush(steps, (-saved, order[item], place))

    for item in items:
        offer(item, 1)
    while steps:
        _, number, place = heapq.heappop(steps)
        item = names[number]
        after = hulls[item][place]
        more = after.nbytes - chosen[item].nbytes
        if more > left:
            continue  # larger choices of this item do not fit either; those of others may
        chosen[item], left = after, left - more
        offer(item, place + 1)
    return _filled(items, chosen, left)


def _filled(
    items: Mapping[T, Sequence[Choice[C]]], chosen: dict[T, Choice[C]], left: int
) -> dict[T, Choice[C]]:
    """The best single changes that still fit, one after the other."""
    while True:
        best: tuple[float, T, Choice[C]] | None = None
        for item, choices in items.items():
            now = chosen[item]
            for one in choices:
                saved = now.error - one.error
                if one.nbytes - now.nbytes <= left and saved > (best[0] if best else 0.0):
                    best = saved, item, one
        if best is None:
            return chosen
        _, item, one = best
        left -= one.nbytes - chosen[item].nbytes
        chosen[item] = one


def _hull(choices: Sequence[Choice[C]]) -> list[Choice[C]]:
    """The lower convex hull, the smallest first: errors fall, by less and less per byte."""
    hull: list[Choice[C]] = []
    for one in sorted(choices, key=lambda choice: (choice.nbytes, choice.error)):
        if hull and one.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _saved(hull[-2], hull[-1]) <= _saved(hull[-2], one):
            hull.pop()
        if hull and one.nbytes == hull[-1].nbytes:
            continue
        hull.append(one)
    return hull


def _saved(before: Choice[C], after: Choice[C]) -> float:
    """Error by byte."""
    return (before.error - after.error) / (after.nbytes - before.nbytes)
