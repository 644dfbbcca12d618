"""Calls that are prepared once, and made again and again with what is in their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.runtime import MoELayer, Pool

from .conftest import EXPERTS, batch

Make = Callable[..., MoELayer]


def test_it_computes_with_what_is_there(make_layer: Make) -> None:
    layer, (x, ids, weights), add = make_layer(), batch(), batch(seed=1)[0]
    skip, out = np.zeros(EXPERTS, bool), np.empty_like(x)
    step = layer.prepare(x, ids, weights, skip=skip, add_to=add, out=out)
    assert step() is out
    for change in ("x", "ids", "weights", "skip", "add"):
        x[:], ids[:], weights[:] = batch(seed=2) if change == "x" else (x, ids, weights)
        ids[:] = np.roll(ids, 1) if change == "ids" else ids
        weights[:] *= 2 if change == "weights" else 1
        skip[2] = change == "skip"
        add[:] += change == "add"
        before = out.copy()
        assert np.array_equal(step(), layer(x, ids, weights, skip=skip, add_to=add)), change
        assert not np.array_equal(out, before), change


def test_layers_of_several_prepared_calls_share_nothing(make_layer: Make) -> None:
    first, second = make_layer("int8"), make_layer("int4")
    a, b = batch(), batch(9, seed=1)
    steps = [first.prepare(*a), second.prepare(*b), first.prepare(*b)]
    found = [step() for step in steps]
    for layer, given, y in zip((first, second, first), (a, b, b), found, strict=True):
        assert np.array_equal(layer(*given), y)


def test_nothing_to_compute(make_layer: Make) -> None:
    x, ids, weights = batch()
    layer = make_layer()
    assert not layer.prepare(x, ids[:, :0].copy(), weights[:, :0].copy())().any()
    assert layer.prepare(x[:0], ids[:0], weights[:0])().shape == (0, x.shape[1])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("x", {"x": batch()[0].T.copy().T}),
        ("ids", {"ids": batch()[1].astype(np.int16)}),
        ("weights", {"weights": batch()[2].astype(np.float16)}),
        ("skip", {"skip": np.zeros(2 * EXPERTS, bool)[::2]}),
        ("add_to", {"add_to": batch()[0].astype(np.float16)}),
    ],
)
def test_what_would_be_copied_is_refused(
    make_layer: Make, name: str, changed: dict[str, Any]
) -> None:
    x, ids, weights = batch()
    given: dict[str, Any] = {"x": x, "ids": ids, "weights": weights} | changed
    make_layer()(**given)
    with pytest.raises(UsageError, match=f"{name} would be copied once"):
        make_layer().prepare(**given)


def test_refusals_of_a_call_and_later(make_layer: Make) -> None:
    x, ids, weights = batch()
    with pytest.raises(UsageError, match="x must have the shape"):
        make_layer().prepare(x[:, 1:], ids, weights)
    step = make_layer(here=[0, None, 2, 3, 4, 5]).prepare(x, np.zeros_like(ids), weights)
    step()
    absent = np.zeros_like(ids)
    step = make_layer(here=[0, None, 2, 3, 4, 5]).prepare(x, absent, weights)
    absent[0, 0] = 1
    with pytest.raises(UsageError, match="no weights here"):
        step()
    with Pool(1) as pool:
        step = MoELayer(make_layer()._packed, pool).prepare(x, ids, weights)
    with pytest.raises(UsageError, match="the pool is closed"):
        step()
