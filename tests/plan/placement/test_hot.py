"""The most used experts of all layers, or of each."""

from __future__ import annotations

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.targets.hot import hot_experts, padded

FREQUENCY = [[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]]


def test_of_all_layers() -> None:
    mask = hot_experts(FREQUENCY, 3)
    assert mask.tolist() == [[False, True, False, True], [False, False, True, False]]
    assert mask.dtype == np.bool_
    assert not hot_experts(FREQUENCY, 0).any()
    assert hot_experts(FREQUENCY, 8).all() and hot_experts(FREQUENCY, 1000).all()


def test_of_each_layer() -> None:
    mask = hot_experts(FREQUENCY, 1, per_layer=True)
    assert mask.tolist() == [[False, False, False, True], [False, False, True, False]]
    assert hot_experts(FREQUENCY, 9, per_layer=True).all()


def test_equal_ones_go_by_layer_and_id() -> None:
    mask = hot_experts(np.ones((20, 50)), 60)
    assert mask[0].all() and mask[1, :10].all() and mask.sum() == 60
    assert hot_experts(np.ones((20, 50)), 7, per_layer=True)[:, :7].all()


def test_layers_of_different_sizes() -> None:
    rows = [[1, 5, 0], [2], [0, 0]]
    table = padded(rows)
    mask = hot_experts(table, 4, experts=[3, 1, 2])
    assert mask.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert hot_experts(table, 99, experts=[3, 1, 2]).sum() == 6
    assert hot_experts(table, 2, True, [3, 1, 2]).sum(axis=1).tolist() == [2, 1, 2]


@pytest.mark.parametrize(("arguments", "words"), [
    (([1, 2], 1), "not \\[layers, experts\\]"),
    (([[1, np.nan]], 1), "negative or not finite"),
    (([[1, -1]], 1), "negative or not finite"),
    (([[1, 2]], -1), "budget must be 0 or more, not -1"),
    (([[1, 2]], 1.5), "budget must be an integer, not 1.5"),
    (([["x"]], 1), "frequency must be an array of numbers"),
    (([[1, 2]], 1, False, [3]), "do not fit"),
    (([[1, 2]], 1, False, [1, 1]), "do not fit"),
])  # fmt: skip
def test_what_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hot_experts(*arguments)  # type: ignore[arg-type]
