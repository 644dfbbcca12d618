"""The choice of methods for a budget, against all choices."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ktconv.quantize.recipes.choose import Choice, choose, smallest

Items = dict[str, list[Choice[int]]]


def drawn(seed: int, items: int = 5, choices: int = 4) -> Items:
    """With points above the hull, equal sizes and equal errors."""
    rng = np.random.default_rng(seed)
    return {
        f"item {i}": [
            Choice(c, int(rng.integers(1, 12)), float(rng.integers(0, 20)) / 4)
            for c in range(choices)
        ]
        for i in range(items)
    }


def best(items: Items, budget: int) -> float:
    """The least error of all combinations."""
    return min(
        sum(one.error for one in some)
        for some in product(*items.values())
        if sum(one.nbytes for one in some) <= budget
    )


@pytest.mark.parametrize("seed", range(40))
def test_it_fits_and_is_nearly_the_best(seed: int) -> None:
    items = drawn(seed)
    least = smallest(items)
    largest_step = max(one.error for some in items.values() for one in some)
    before = float("inf")
    for budget in range(least, least + 40, 3):
        chosen = choose(items, budget)
        assert chosen.keys() == items.keys()
        assert sum(one.nbytes for one in chosen.values()) <= budget
        error = sum(one.error for one in chosen.values())
        assert best(items, budget) <= error <= best(items, budget) + largest_step
        assert chosen == choose(items, budget)
        before = min(before, error)
    every = choose(items, 10**6)
    assert sum(one.error for one in every.values()) == best(items, 10**6)


def test_what_does_not_fit() -> None:
    items = drawn(1)
    with pytest.raises(ValueError, match="smallest"):
        choose(items, smallest(items) - 1)
    found = choose(items, smallest(items))
    assert sum(one.nbytes for one in found.values()) == smallest(items)


def test_the_step_that_saves_most_per_byte_is_taken_first() -> None:
    items = {
        "coarse": [Choice("a", 4, 1.0), Choice("b", 8, 0.5)],
        "fine": [Choice("a", 4, 8.0), Choice("b", 8, 4.0)],
    }
    assert {name: one.what for name, one in choose(items, 12).items()} == {
        "coarse": "a", "fine": "b",
    }  # fmt: skip


def test_a_choice_off_the_hull_uses_what_is_left() -> None:
    """b is above the line from a to c, but c does not fit."""
    items = {"one": [Choice("a", 1, 10.0), Choice("b", 3, 9.0), Choice("c", 5, 0.0)]}
    assert choose(items, 4)["one"].what == "b"
    assert choose(items, 5)["one"].what == "c"
