"""Choices of routers, counted window by window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktconv.errors import CheckpointError
from ktconv.stats.counting import CountTap, chosen_ids


def tap_of(torch: Any, windows: list[Any], **options: Any) -> CountTap:
    """Layer 2 with 4 experts, fed with windows of ids."""
    tap = CountTap({2: 4}, **options)
    for number, ids in enumerate(windows):
        tap.chosen(2, number, torch.tensor(ids), torch.ones(len(ids), len(ids[0])))
    tap.layer_done(2)
    return tap


WINDOWS = [[[0, 3], [3, -1]], [[3, 1]]]


def test_counts(torch: Any) -> None:
    (layer,) = tap_of(torch, WINDOWS).layers
    assert (layer.layer, layer.tokens, layer.counts.tolist()) == (2, 3, [1, 1, 0, 3])


def test_ids_are_in_the_order_of_the_text(torch: Any) -> None:
    tap = tap_of(torch, WINDOWS, keep=True)
    assert tap.ids[2].tolist() == [[0, 3], [3, -1], [3, 1]] and tap.ids[2].dtype == np.int32
    assert tap_of(torch, WINDOWS).ids == {}


@pytest.mark.parametrize("keep", [False, True])
def test_a_later_run_goes_on(keep: bool, torch: Any) -> None:
    """With the next layer; restored arrays are not written to."""
    state = dict(tap_of(torch, WINDOWS, keep=keep).state())
    for array in state.values():
        array.setflags(write=False)
    tap = CountTap({2: 4, 5: 2}, keep=keep)
    tap.restore(state)
    tap.chosen(5, 0, torch.tensor([[1]]), torch.ones(1, 1))
    assert [layer.counts.tolist() for layer in tap.layers] == [[1, 1, 0, 3], [0, 1]]
    assert tap.layers[0].tokens == 3
    if keep:
        assert tap.ids[2].tolist() == [[0, 3], [3, -1], [3, 1]]
    again = CountTap({2: 4, 5: 2}, keep=keep)
    again.restore(tap.state())
    assert [layer.counts.tolist() for layer in again.layers] == [[1, 1, 0, 3], [0, 1]]


def test_layers_that_were_not_called(torch: Any) -> None:
    with pytest.raises(CheckpointError, match="the model did not call layer 2's experts"):
        _ = CountTap({2: 4}).layers
    with pytest.raises(CheckpointError, match="the model did not call layer 2's experts"):
        _ = tap_of(torch, [[[-1, -1]]]).layers


def test_tokens_that_come_for_each_expert(torch: Any) -> None:
    """As those of Llama 4: the ids of 3 experts and 4 tokens."""
    ids = [[-1], [0], [-1], [0], [-1], [-1], [-1], [-1], [2], [-1], [-1], [2]]
    tap = CountTap({2: 3}, apart={2}, keep=True)
    tap.chosen(2, 0, torch.tensor(ids), torch.ones(12, 1))
    (layer,) = tap.layers
    assert layer.tokens == 4 and layer.counts.tolist() == [2, 0, 2]
    assert tap.ids[2].tolist() == [[2, -1], [0, -1], [-1, -1], [0, 2]]


def test_experts_without_weights_are_none(torch: Any) -> None:
    """As LongCat's that return their input, which are numbered behind the others; and Zaya's that
    do nothing, which have no weight."""
    ids = torch.tensor([[0, 4], [7, 3]])
    assert chosen_ids(ids, ids / 8 + 1, 4).tolist() == [[0, -1], [-1, 3]]
    assert chosen_ids(ids, ids, 8).tolist() == [[-1, 4], [7, 3]]
    assert ids.tolist() == [[0, 4], [7, 3]]  # the model goes on with them
