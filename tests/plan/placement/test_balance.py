"""Copies of busy experts: the published vectors, properties on random loads, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.plan.placement.balance import (
    balance,
    evenness,
    initial_map,
    pack,
    replica_slots,
    replicas_of,
    replicate,
)

# DeepSeek's published example: 16 places, 4 groups, 2 nodes, 8 GPUs.
LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PLACES = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example() -> None:
    both = balance(LOADS, 16, groups=4, nodes=2, gpus=8)
    assert both.physical_to_logical.tolist() == PLACES
    for load, places in zip(LOADS, PLACES, strict=True):
        one = balance(load, 16, groups=4, nodes=2, gpus=8)
        assert one.physical_to_logical.tolist() == places
        assert one.copies.tolist() == np.bincount(places).tolist()
        assert one.logical_to_physical.shape == (12, 2)


def test_a_flat_example() -> None:
    load = [10, 40, 20, 5]
    found = balance(load, 6, gpus=3)
    assert found.physical_to_logical.tolist() == [2, 3, 1, 1, 1, 0]
    assert found.copies.tolist() == [1, 3, 1, 1]
    assert found.logical_to_physical.tolist() == [
        [5, -1, -1], [2, 3, 4], [0, -1, -1], [1, -1, -1],
    ]  # fmt: skip
    loads = found.gpu_loads(load, 3)
    assert loads == pytest.approx([25, 26.6667, 23.3333], abs=1e-4)
    assert evenness(loads) == pytest.approx(25 / 26.6667, abs=1e-5)


def test_groups_that_nodes_cannot_share_are_ignored() -> None:
    flat = balance(LOADS, 16, gpus=8).physical_to_logical
    assert (balance(LOADS, 16, 3, 2, 8).physical_to_logical == flat).all()


def test_packing() -> None:
    bins, places = pack([90, 132, 40, 61, 104, 165, 39, 4], 4)
    assert bins.tolist() == [3, 1, 2, 3, 2, 0, 1, 0]
    assert places.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    bins, places = pack([5, 1, 3], 3)
    assert bins.tolist() == [0, 1, 2] and places.tolist() == [0, 0, 0]


def test_equal_loads_go_by_index() -> None:
    """Whatever the machine's sort does with equal keys."""
    bins, places = pack(np.ones(64), 4)
    assert bins.tolist() == [item % 4 for item in range(64)]
    assert places.tolist() == [item // 4 for item in range(64)]
    slots, copies = replicate(np.ones(8), 11)
    assert slots.tolist() == [*range(8), 0, 1, 2] and copies.tolist() == [2, 2, 2, 1, 1, 1, 1, 1]


def test_places_before_loads_are_known() -> None:
    assert initial_map(4, 3).tolist() == [0, 1, 2, 3, 0, 1, 2]
    tables = replicas_of(initial_map(4, 3), 4)
    assert tables.logical_to_physical.tolist() == [[0, 4], [1, 5], [2, 6], [3, -1]]
    assert tables.copies.tolist() == [2, 2, 2, 1]
    assert initial_map(2, 5).tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_choices_take_turns_among_copies() -> None:
    table = [[0, 4], [1, 5], [2, -1], [3, -1]]
    assert replica_slots(table, [[0, 1], [0, 2], [1, 0]]).tolist() == [[0, 5], [0, 2], [1, 4]]
    assert replica_slots(table, [[-1, 4], [99, 1]]).tolist() == [[-1, -1], [-1, 5]]
    assert replica_slots(table, np.zeros((0, 2), int)).shape == (0, 2)


@pytest.mark.parametrize("groups, nodes, gpus", [(1, 1, 4), (8, 1, 4), (8, 2, 8), (4, 4, 16)])
def test_random_loads(groups: int, nodes: int, gpus: int) -> None:
    rng = np.random.default_rng(groups + gpus)
    load = rng.pareto(1.2, (7, 64)) * 1000
    found = balance(load, 80, groups, nodes, gpus)
    slots, table, copies = found.physical_to_logical, found.logical_to_physical, found.copies
    assert (copies >= 1).all() and (copies.sum(axis=1) == 80).all()
    for layer in range(7):
        assert (balance(load[layer], 80, groups, nodes, gpus).physical_to_logical
                == slots[layer]).all()  # fmt: skip
        for expert in range(64):
            there = table[layer, expert][table[layer, expert] >= 0]
            assert (slots[layer, there] == expert).all() and len(there) == copies[layer, expert]
            assert (np.diff(there) > 0).all()
            of_nodes = set((there // (80 // nodes)).tolist())
            assert nodes == 1 or len(of_nodes) == 1  # groups stay on their node
    loads = found.gpu_loads(load, gpus)
    assert np.allclose(loads.sum(axis=1), load.sum(axis=1))
    # Balanced is never worse than what was there before, and much better for such loads.
    before = replicas_of(np.tile(initial_map(64, 16), (7, 1)), 64).gpu_loads(load, gpus)
    if nodes == 1:
        assert (loads.max(axis=1) <= before.max(axis=1) + 1e-9).all()


Loads = list[float]


def packed(loads: Loads, bins: int) -> list[list[int]]:
    """Items of each bin, as `pack`'s docstring says it, one after the other."""
    size = len(loads) // bins
    if size == 1:
        return [[item] for item in range(bins)]
    found: list[list[int]] = [[] for _ in range(bins)]
    totals = [0.0] * bins  # not by sum(), which is more exact from Python 3.12 on
    for item in sorted(range(len(loads)), key=lambda one: (-loads[one], one)):
        free = [one for one in range(bins) if len(found[one]) < size]
        least = min(free, key=lambda one: totals[one])
        found[least].append(item)
        totals[least] += loads[item]
    return found


def balanced(load: Loads, physical: int, groups: int, nodes: int, gpus: int) -> list[int]:
    """The expert at each place, by the three steps of docs/plan.md."""
    size, places = len(load) // groups, []
    sums = [sum(load[group * size : (group + 1) * size]) for group in range(groups)]
    for held in packed(sums, nodes):
        ids = sorted(group * size + member for group in held for member in range(size))
        copies = list(ids)
        while len(copies) < physical // nodes:
            copies.append(max(ids, key=lambda one: load[one] / copies.count(one)))
        shares = [load[one] / copies.count(one) for one in copies]
        places += [copies[item] for gpu in packed(shares, gpus // nodes) for item in gpu]
    return places


@pytest.mark.parametrize("groups, nodes, gpus", [(1, 1, 4), (8, 2, 8), (4, 4, 16), (8, 4, 4)])
@pytest.mark.parametrize("most", [3, 1000])
def test_the_steps_one_by_one(groups: int, nodes: int, gpus: int, most: int) -> None:
    """Whole numbers, so that sums are exact; small ones, so that many are equal."""
    load = np.random.default_rng(most + gpus).integers(0, most, (5, 32))
    found = balance(load, 48, groups, nodes, gpus).physical_to_logical
    for row, places in zip(load.tolist(), found.tolist(), strict=True):
        assert places == balanced(row, 48, groups, nodes, gpus)


def test_the_best_copies() -> None:
    """No other numbers of copies have a lower load per copy."""
    load = np.array([7.0, 1, 4, 2])
    _, copies = replicate(load, 7)
    best = min(
        (max(load / np.array(one)) for one in np.ndindex(5, 5, 5, 5) if min(one) and sum(one) == 7),
    )
    assert max(load / copies) == best


@pytest.mark.parametrize(("arguments", "words"), [
    (([1, 2, 3], 2), "2 places are less than 3 experts"),
    (([1, 2, 3], 4, 1, 1, 3), r"4 places \(3 experts and 1 copy\) cannot be shared out evenly"),
    (([1, 2, 3, 4], 4, 2, 2, 3), "3 GPUs cannot be shared out evenly by 2 nodes"),
    (([1, 2, 3], 4, 2, 2, 4), "3 experts do not divide into 2 groups"),
    (([1, -2, 3], 3), "negative or not finite"),
    (([1, np.nan, 3], 3), "negative or not finite"),
    (([], 3), "has no experts"),
    ((3.0, 3), "has no experts"),
    (([1, 2], 2, 0), "groups must be 1 or more, not 0"),
    (([1, 2], 2, 1, 1, 0), "gpus must be 1 or more, not 0"),
    (([1, 2], 2.0), "physical must be an integer, not 2.0"),
    (([1, 2], 2, float("nan")), "groups must be an integer, not nan"),
    (([1, 2], 10**30), "physical must be at most"),
    ((["x", "y"], 2), "a load must be an array of numbers"),
])  # fmt: skip
def test_what_cannot_be_balanced(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        balance(*arguments)  # type: ignore[arg-type]


def test_maps_with_holes_are_refused() -> None:
    with pytest.raises(UsageError, match="expert 1 has no place"):
        replicas_of([0, 2, 0], 3)
    with pytest.raises(UsageError, match="not one of 0 to 2"):
        replicas_of([0, 3, 1, 2], 3)
    with pytest.raises(UsageError, match="cannot hold 3 experts"):
        replicas_of(np.zeros(0, int), 3)
    with pytest.raises(UsageError, match="places and ids must be integers, not float64"):
        replicas_of([0, 1, 2.5], 3)
    with pytest.raises(UsageError, match="4 items cannot be packed evenly into 3 bins"):
        pack([1, 2, 3, 4], 3)


def test_idle_gpus_are_even() -> None:
    assert evenness([[0, 0], [1, 3]]).tolist() == [1, pytest.approx(2 / 3)]
