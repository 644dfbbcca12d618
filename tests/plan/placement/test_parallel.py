"""How many GPUs can share the experts of a layer, and which has what."""

from __future__ import annotations

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.plan.placement.parallel import (
    PLACEMENTS,
    Grain,
    LayerShape,
    expert_map,
    expert_parallel,
    placed,
    round_robin_tables,
    tensor_parallel,
)

GROUP_128, GROUP_64 = Grain(128, "the group size 128"), Grain(64, "the group size 64")
WORD = Grain(8, "the 8 weights of an int32 word")


def layer(intermediate: int, *grains: Grain) -> LayerShape:
    return LayerShape(range(8), intermediate, grains)


@pytest.mark.parametrize(("shape", "size", "reason"), [
    (layer(768, GROUP_128), 2, None),
    (layer(768, GROUP_128), 4, "192 of the intermediate size 768"),
    (layer(768, GROUP_64), 4, None),
    (layer(768, GROUP_64), 5, "intermediate size 768 is not divisible by 5"),
    (layer(768, WORD), 8, None),  # one scale per row: columns can be cut anywhere
    (layer(72, WORD), 6, "12 of the intermediate size 72, which is not divisible by the 8 weights"),
    (layer(72), 6, None),
    (layer(100, GROUP_128), 1, None),  # nothing is cut
])  # fmt: skip
def test_tensor_parallel(shape: LayerShape, size: int, reason: str | None) -> None:
    split = tensor_parallel([shape], size)
    assert split.possible == (reason is None)
    assert reason is None or reason in str(split.reason)


def test_expert_parallel() -> None:
    assert placed(range(8), 4, "linear") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placed(range(8), 4, "round_robin") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert placed(range(8), 3, "linear") == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert placed(range(2), 3, "linear") == [[0], [1], []]
    assert expert_parallel([layer(256)], 4).possible
    assert not expert_parallel([layer(256)], 3).possible
    ids = [1, 4, 5, 9, 12]
    for size in range(1, 10):
        for placement in PLACEMENTS:
            ranks = placed(ids, size, placement)
            assert len(ranks) == size and sorted(one for rank in ranks for one in rank) == ids


# ---- maps ------------------------------------------------------------------------------


def test_linear_maps() -> None:
    """The remainder goes to the first GPUs."""
    maps = [expert_map(8, 3, rank).tolist() for rank in range(3)]
    assert maps == [
        [0, 1, 2, -1, -1, -1, -1, -1],
        [-1, -1, -1, 0, 1, 2, -1, -1],
        [-1, -1, -1, -1, -1, -1, 0, 1],
    ]
    assert expert_map(8, 3, 0).dtype == np.int32


def test_round_robin_maps_and_tables() -> None:
    assert expert_map(8, 3, 1, "round_robin").tolist() == [-1, 0, -1, -1, 1, -1, -1, 2]
    tables = round_robin_tables(8, 3)
    assert tables.global_to_physical.tolist() == [0, 3, 6, 1, 4, 7, 2, 5]
    assert tables.physical_to_global.tolist() == [0, 3, 6, 1, 4, 7, 2, 5]
    assert [ids.tolist() for ids in tables.local_to_global] == [[0, 3, 6], [1, 4, 7], [2, 5]]


@pytest.mark.parametrize("experts", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("ep", [1, 2, 3, 8])
def test_every_expert_is_on_one_gpu(experts: int, ep: int) -> None:
    for placement in PLACEMENTS:
        maps = np.array([expert_map(experts, ep, rank, placement) for rank in range(ep)])
        assert ((maps >= 0).sum(axis=0) == 1).all()
        counts = (maps >= 0).sum(axis=1)
        assert counts.tolist() == [experts // ep + (rank < experts % ep) for rank in range(ep)]
        for row in maps:
            assert sorted(row[row >= 0]) == list(range((row >= 0).sum()))
    tables = round_robin_tables(experts, ep)
    base, rem = divmod(experts, ep)
    owner, local = np.arange(experts) % ep, np.arange(experts) // ep
    expected = owner * base + np.minimum(owner, rem) + local
    assert (tables.global_to_physical == expected).all()
    assert (tables.physical_to_global[tables.global_to_physical] == np.arange(experts)).all()


def test_one_gpu_has_the_identity() -> None:
    for placement in PLACEMENTS:
        assert expert_map(5, 1, 0, placement).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("arguments", "words"), [
    ((8, 2, 2, "linear"), "rank 2 is not one of 2 GPUs"),
    ((8, 2, -1, "linear"), "rank must be 0 or more, not -1"),
    ((0, 2, 0, "linear"), "experts must be 1 or more, not 0"),
    ((8, 0, 0, "linear"), "ep must be 1 or more, not 0"),
    ((8, 2.0, 0, "linear"), "ep must be an integer, not 2.0"),
    ((8, 10**30, 0, "linear"), "ep must be at most"),
    ((8, 2, 0, "random"), "placement 'random' is unknown"),
])  # fmt: skip
def test_maps_that_cannot_be(arguments: tuple[int, int, int, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        expert_map(*arguments)  # type: ignore[arg-type]
