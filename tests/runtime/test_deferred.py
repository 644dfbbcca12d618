"""Deferred experts: which ones, by token alone, and that none is lost or counted twice (D8)."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.runtime import DeferredExperts, MoELayer, Pool, split_deferred
from ktconv.system.arrays import F32, I64

from .conftest import EXPERTS, HIDDEN, TOP_K, batch

Make = Callable[..., MoELayer]
SUM_BOUND = 2e-6  # of a sum in another order, relative to its largest element


@pytest.fixture
def layers(make_layer: Make) -> list[MoELayer]:
    return [make_layer("int8"), make_layer("int4"), make_layer("bf16"), make_layer("int8", parts=2)]


def same_sum(found: F32, expected: F32) -> bool:
    return bool(np.abs(found - expected).max() <= SUM_BOUND * np.abs(expected).max())


# ---- the split -------------------------------------------------------------------------


@pytest.mark.parametrize("keep", range(TOP_K + 3))
def test_each_expert_is_in_one_of_both(keep: int) -> None:
    ids = np.arange(60).reshape(20, 3)
    weights = np.random.default_rng(0).random((20, 3), np.float32)
    now, later = split_deferred(ids, weights, keep)
    assert np.array_equal(np.where(now >= 0, now, later), ids)
    assert ((now >= 0) != (later >= 0)).all()
    assert ((now >= 0).sum(axis=1) == min(keep, 3)).all()
    kept = np.where(now >= 0, weights, np.inf).min(axis=1)
    assert (kept >= np.where(later >= 0, weights, -np.inf).max(axis=1)).all()


def test_a_vector_by_hand() -> None:
    """The second token keeps expert 1, and the first defers it all the same."""
    ids, weights = np.array([[0, 1], [1, 2]]), np.array([[0.9, 0.1], [0.8, 0.2]], np.float32)
    now, later = split_deferred(ids, weights, 1)
    assert now.tolist() == [[0, -1], [1, -1]] and later.tolist() == [[-1, 1], [-1, 2]]


def test_a_token_does_not_depend_on_others() -> None:
    _, ids, weights = batch(30)
    now, later = split_deferred(ids, weights, 2)
    for t in range(30):
        for one, all_of_them in zip(
            split_deferred(ids[t], weights[t], 2), (now, later), strict=True
        ):
            assert np.array_equal(one, all_of_them[t])


def test_ties_negative_ids_and_odd_weights() -> None:
    def split(ids: list[int], weights: list[float], keep: int) -> list[Any]:
        found = split_deferred(np.array(ids, int), np.array(weights, np.float32), keep)
        return [array.tolist() for array in found]

    assert split([4, 7, 1], [0.5, 0.5, 0.5], 2) == [[4, 7, -1], [-1, -1, 1]]
    assert split([-1, 7, -5, 1], [9, 0.1, 9, 0.2], 1) == [[-1, -1, -1, 1], [-1, 7, -5, -1]]
    assert split([-1, -2], [1, 2], 1) == [[-1, -1], [-1, -2]]
    assert split([5, 5, 5], [0.1, 0.3, 0.2], 1) == [[-1, 5, -1], [5, -1, 5]]
    assert split([0, 1, 2], [-3, -1, -2], 1) == [[-1, 1, -1], [0, -1, 2]]
    assert split([0, 1], [np.nan, 0.1], 1) == [[-1, 1], [0, -1]]
    assert split([], [], 1) == [[], []]
    assert split_deferred(np.zeros((0, 3), np.int64), np.zeros((0, 3), "f4"), 1)[0].shape == (0, 3)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8])
def test_integers_of_any_size(dtype: Any) -> None:
    """An unsigned one has no -1: 255 may be an expert."""
    ids = np.array([[100, 3]], dtype)
    now, later = split_deferred(ids, np.array([[0.4, 0.6]], np.float32), 1)
    assert now.tolist() == [[-1, 3]] and later.tolist() == [[100, -1]]
    assert now.dtype == (np.int64 if dtype == np.uint8 else dtype)


@pytest.mark.parametrize(
    ("ids", "weights", "keep", "match"),
    [
        (np.zeros((2, 3), int), np.zeros((2, 2)), 1, "must have one shape"),
        (np.int64(3), np.float32(1), 1, "ids is neither a NumPy array nor"),
        (np.zeros(3), np.zeros(3), 1, "ids must not be float64"),
        (np.zeros(3, int), np.zeros(3, int), 1, "weights must not be int64"),
        ([0, 1], [0.5, 0.5], 1, "ids is neither"),
        (np.zeros(3, int), np.zeros(3), -1, "keep must be 0 or more"),
        (np.zeros(3, int), np.zeros(3), 1.0, "keep must be an integer"),
        (np.zeros(3, int), np.zeros(3), True, "keep must be an integer"),
    ],
)
def test_what_is_no_split(ids: Any, weights: Any, keep: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        split_deferred(ids, weights, keep)


# ---- from layer to layer ---------------------------------------------------------------


@pytest.mark.parametrize("keep", range(TOP_K + 2))
@pytest.mark.parametrize("tokens", [1, 7])
def test_nothing_is_lost_over_layers(layers: list[MoELayer], keep: int, tokens: int) -> None:
    """The sum over layers is that without deferral; the first lacks what the second has."""
    batches = [batch(tokens, seed) for seed in range(len(layers))]
    plain = [layer(*one) for layer, one in zip(layers, batches, strict=True)]
    deferred = DeferredExperts(keep)
    found = [
        deferred(layer, *one, last=layer is layers[-1])
        for layer, one in zip(layers, batches, strict=True)
    ]
    assert deferred.flush() is None
    assert same_sum(np.sum(found, axis=0), np.sum(plain, axis=0))
    carried = np.zeros_like(found[0])
    for n, (layer, (x, ids, weights)) in enumerate(zip(layers, batches, strict=True)):
        now, later = split_deferred(ids, weights, keep)
        own = layer(x, ids if n == len(layers) - 1 else now, weights)
        assert same_sum(found[n], own + carried)
        carried = layer(x, later, weights)


def test_results_do_not_depend_on_the_batch(layers: list[MoELayer]) -> None:
    batches = [batch(9, seed) for seed in (0, 1)]

    def run(rows: slice) -> list[F32]:
        with DeferredExperts(1) as deferred:
            parts = [tuple(array[rows] for array in one) for one in batches]
            return [
                deferred(layers[0], *parts[0]),
                deferred(layers[1], *parts[1], last=True),
            ]

    whole = run(slice(None))
    for t in range(9):
        for one, all_of_them in zip(run(slice(t, t + 1)), whole, strict=True):
            assert np.array_equal(one[0], all_of_them[t])


def test_a_layer_that_is_called_again(make_layer: Make) -> None:
    """What was carried is added once, however often layers are called."""
    layer, one = make_layer(), batch()
    plain = layer(*one)
    deferred = DeferredExperts(1)
    total = deferred(layer, *one)
    for count in range(2, 7):
        total = total + deferred(layer, *one)
        whole = count * plain
        _, later = split_deferred(one[1], one[2], 1)
        assert same_sum(total, whole - layer(one[0], later, one[2]))
    rest = deferred.flush()
    assert rest.dtype == np.float32 and same_sum(total + rest, whole)
    assert deferred.flush() is None


def test_arguments_may_change_at_once(make_layer: Make) -> None:
    """While the deferred part still waits for the queue; out may be x."""
    x, ids, weights = batch()
    skip = np.zeros(EXPERTS, bool)
    skip[3] = True
    with Pool(2) as pool:
        layer = MoELayer(make_layer()._packed, pool)
        plain = layer(x, ids, weights, skip=skip)
        opened = blocked(pool)
        mine = [x.copy(), ids.copy(), weights.copy(), skip.copy()]
        deferred = DeferredExperts(1)
        y = deferred(layer, *mine[:3], skip=mine[3], out=mine[0])
        assert y is mine[0]
        y = y.copy()
        for array in mine:
            array[:] = 1
        opened()
        assert same_sum(y + deferred.flush(), plain)


def blocked(pool: Pool) -> Callable[[], None]:
    """Keeps the queue waiting until what is returned is called."""
    opened = Event()
    pool.submit(lambda: opened.wait(30))
    return opened.set


def test_another_number_of_tokens(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch(6)
    plain = layer(x, ids, weights)
    deferred = DeferredExperts(1)
    y = deferred(layer, x, ids, weights)
    for other in (x[:4], x[:4].reshape(2, 2, -1), [1], None):
        with pytest.raises(UsageError, match="the deferred sum of the layer before is") as refusal:
            deferred(layer, other, ids[:4], weights[:4])
        assert "flush" in str(refusal.value.hint)
    assert same_sum(y + deferred.flush(), plain)
    assert deferred(layer, x[:4], ids[:4], weights[:4]).shape == (4, HIDDEN)


def test_an_error_in_between_loses_nothing(make_layer: Make) -> None:
    """Of an argument, or of an expert that is not there: the same call can be made again."""
    layer, (x, ids, weights) = make_layer(), batch(6)
    hole = make_layer(here=[0, None, 2, 3, 4, 5])
    plain = layer(x, ids, weights)
    deferred = DeferredExperts(2)
    y = deferred(layer, x, ids, weights)
    wrong: list[tuple[MoELayer, tuple[Any, I64, Any]]] = [
        (layer, (x, ids[:, :2], weights)),
        (layer, (x.astype(np.float64), ids, weights)),
        (layer, (x, ids, weights.astype(np.float64))),
        (hole, (x, np.ones_like(ids), weights)),
    ]
    for one, arguments in wrong:
        with pytest.raises(UsageError):
            deferred(one, *arguments)
    y = y + deferred(layer, x, ids, weights, last=True)
    assert same_sum(y, 2 * plain)


def test_an_error_of_the_deferred_part(make_layer: Make) -> None:
    """Is raised where its sum is asked for."""
    layer, (x, ids, weights) = make_layer(here=[0, None, 2, 3, 4, 5]), batch(6)
    ids[:] = [0, 2, 1]
    weights[:] = [0.5, 0.4, 0.1]
    deferred = DeferredExperts(2)
    deferred(layer, x, ids, weights)
    with pytest.raises(UsageError, match="no weights here"):
        deferred(layer, x, ids, weights, last=True)
    with pytest.raises(UsageError, match="no weights here"):
        deferred.flush()


def test_what_is_left_over_is_an_error(make_layer: Make) -> None:
    layer, one = make_layer(), batch()
    with pytest.raises(UsageError, match="were not added"), DeferredExperts(1) as deferred:
        deferred(layer, *one)
    with pytest.raises(ZeroDivisionError), DeferredExperts(1) as deferred:  # which stays the error
        deferred(layer, *one)
        raise ZeroDivisionError
    with DeferredExperts(1) as deferred:
        deferred(layer, *one)
        deferred.flush()
    with DeferredExperts(1) as deferred:
        deferred(layer, *one, last=True)


def test_no_experts_and_no_tokens(make_layer: Make) -> None:
    layer = make_layer()
    for tokens, top_k in ((0, 3), (4, 0), (0, 0)):
        x, ids = np.ones((tokens, HIDDEN), np.float32), np.zeros((tokens, top_k), np.int64)
        weights = np.ones((tokens, top_k), np.float32)
        with DeferredExperts(1) as deferred:
            for last in (False, False, True):
                assert not deferred(layer, x, ids, weights, last=last).any()


def test_layers_on_several_pools(make_layer: Make) -> None:
    one = batch()
    with Pool(1) as first, Pool(2) as second:
        layers = [MoELayer(make_layer()._packed, pool) for pool in (first, second, first)]
        with DeferredExperts(1) as deferred:
            found = [deferred(layer, *one, last=layer is layers[-1]) for layer in layers]
        assert same_sum(np.sum(found, axis=0), 3 * layers[0](*one))
