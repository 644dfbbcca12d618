"""Calls of a layer: kinds and dtypes of arrays, shapes, masks, sums, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.runtime import MoELayer, free_workspaces

from .conftest import EXPERTS, HIDDEN, TOP_K, batch

Make = Callable[..., MoELayer]
READ_ONLY = np.broadcast_to(np.float32(0), (5, HIDDEN))


class Odd:
    """Has the shape of x, and nothing else of an array."""

    shape = 5, HIDDEN


def stored(x: Any, dtype: str) -> Any:
    return f32_to_bf16(x) if dtype == "bf16" else x.astype({"fp16": "f2", "fp32": "f4"}[dtype])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_result_is_like_x(make_layer: Make, dtype: str) -> None:
    layer, (x, ids, weights) = make_layer(), batch()
    given = stored(x, dtype)
    y = layer(given, ids, weights)
    assert y.dtype == given.dtype and y.shape == x.shape
    wide = bf16_to_f32(given) if dtype == "bf16" else given.astype(np.float32)
    exact = np.empty_like(x)
    assert layer(f32_to_bf16(wide), ids, weights, out=exact) is exact
    assert np.array_equal(y, stored(exact, dtype))


def test_leading_dimensions_stay(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch(6)
    flat = layer(x, ids, weights)
    y = layer(x.reshape(2, 3, 1, -1), ids.reshape(2, 3, 1, -1), weights.reshape(2, 3, 1, -1))
    assert y.shape == (2, 3, 1, HIDDEN) and np.array_equal(y.reshape(6, -1), flat)
    one = layer(x[0], ids[0], weights[0])
    assert one.shape == (HIDDEN,) and np.array_equal(one, flat[0])
    for shape in ((0,), (0, 4)):
        nothing = [np.zeros((*shape, array.shape[-1]), array.dtype) for array in (x, ids, weights)]
        assert layer(*nothing).shape == (*shape, HIDDEN)


def test_other_strides_and_integers(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch(6)
    expected = layer(x, ids, weights)
    assert np.array_equal(layer(np.asfortranarray(x), ids, weights), expected)
    assert np.array_equal(layer(x, ids[:, ::-1], weights[:, ::-1]), expected)
    for dtype in (np.int8, np.uint8, np.int16, np.int32):
        assert np.array_equal(layer(x, ids.astype(dtype), weights), expected)
    half = weights.astype(np.float16)
    assert np.array_equal(layer(x, ids, half), layer(x, ids, half.astype(np.float32)))


def test_results_do_not_alias(make_layer: Make) -> None:
    """Of any layer, with any workspace."""
    layer, (x, ids, weights) = make_layer(), batch()
    first = layer(x, ids, weights)
    kept = first.copy()
    for memory in layer.pool.workspaces:
        memory[:] = 0xFF
    others = [make_layer("int4")(x, ids, weights), layer(-x, ids, weights)]
    assert np.array_equal(first, kept)
    assert not any(np.shares_memory(first, other) for other in others)
    assert np.array_equal(layer(x, ids, weights), kept)
    free_workspaces(layer.pool)
    assert not layer.pool.workspaces
    assert np.array_equal(layer(x, ids, weights), kept)


def test_ids_and_masks_that_contribute_nothing(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch(9)
    skip = np.zeros(EXPERTS, bool)
    skip[[1, 4]] = True
    for beyond in (-1, EXPERTS, 99, -(1 << 40)):
        masked = np.where(skip[ids], beyond, ids)
        assert np.array_equal(layer(x, masked, weights), layer(x, ids, weights, skip=skip))
    none = np.full_like(ids, -1)
    assert not layer(x, none, weights).any()
    no_choice = np.empty((9, 0), np.int64), np.empty((9, 0), np.float32)
    assert not layer(x, *no_choice).any()
    assert np.array_equal(layer(x, *no_choice, add_to=x), x)


def test_an_absent_expert_must_be_skipped(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(here=[0, None, 2, 3, None, 5]), batch(9)
    out = np.full_like(x, 7)
    with pytest.raises(UsageError, match="no weights here") as refusal:
        layer(x, ids, weights, out=out)
    assert "skip" in str(refusal.value.hint) and (out == 7).all()
    assert layer.slots.tolist() == [0, -1, 2, 3, -1, 5]
    skip = layer.slots < 0
    assert np.array_equal(
        layer(x, ids, weights, skip=skip), make_layer()(x, ids, weights, skip=skip)
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_add_to(make_layer: Make, dtype: str) -> None:
    layer, (x, ids, weights), add = make_layer(), batch(), batch(seed=1)[0]
    given = stored(add, dtype)
    wide = bf16_to_f32(given) if dtype == "bf16" else given.astype(np.float32)
    before = given.copy()
    y = layer(x, ids, weights, add_to=given)
    assert np.array_equal(given, before)
    assert np.array_equal(y, layer(x, ids, weights) + wide)
    assert layer(x, ids, weights, add_to=given, out=given) is given
    assert np.array_equal(given, stored(y, dtype))


def test_in_place_in_more_than_a_batch_of_the_kernels(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch(2100)
    expected = layer(x, ids, weights, add_to=x)
    pieces = [
        layer(x[at], ids[at], weights[at], add_to=x[at]) for at in (slice(900), slice(900, None))
    ]
    assert np.array_equal(np.concatenate(pieces), expected)
    assert layer(x, ids, weights, add_to=x, out=x) is x
    assert np.array_equal(x, expected)


def test_repeated_experts_count_each_time(make_layer: Make) -> None:
    """One token too, of which the reference applies the activation twice (D6)."""
    layer = make_layer()
    for tokens in (1, 2, 9):
        x, ids, weights = batch(tokens)
        twice = np.repeat(ids[:, :1], 2, axis=1)
        y = layer(x, twice, weights[:, :2])
        once = layer(x, ids[:, :1], weights[:, :2].sum(axis=1, keepdims=True))
        assert np.allclose(y, once, rtol=1e-5, atol=1e-5)


def test_a_batch_is_its_tokens(make_layer: Make) -> None:
    for method in ("int8", "int4", "gint4-32"):
        layer, (x, ids, weights) = make_layer(method, parts=1), batch(33)
        y = layer(x, ids, weights)
        for t in range(33):
            assert np.array_equal(layer(x[t], ids[t], weights[t]), y[t])


def test_plan_bytes(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch(40)
    free_workspaces(layer.pool)
    layer(x, ids, weights)
    used = sum(memory.nbytes for memory in layer.pool.workspaces)
    assert layer.plan_bytes(40, TOP_K, "fp32") == used + x.nbytes
    assert layer.plan_bytes(40, TOP_K) == used + x.nbytes // 2
    assert layer.plan_bytes(40) == layer.plan_bytes(40, 8)
    for numbers in ((-1, 2), (3, 0), (3, 1 << 20), (1 << 62, 2)):
        with pytest.raises(UsageError):
            layer.plan_bytes(*numbers)
    with pytest.raises(UsageError, match="float64"):
        layer.plan_bytes(1, 1, "float64")


@pytest.mark.parametrize(
    ("match", "changed"),
    [
        (r"x must have the shape \[\.\.\., 256\], got \[5, 255\]", {"x": np.zeros((5, 255), "f4")}),
        (r"x must have the shape", {"x": np.float32(1)}),
        (
            r"x must be bf16, fp16 or fp32 of shape \[5, 256\], got float64",
            {"x": np.zeros((5, 256))},
        ),
        (r"x is neither a NumPy array nor a torch tensor, but a", {"x": Odd()}),
        (
            r"ids must have the shape \[5, top-k\], as x is \[5, ",
            {"ids": np.zeros((4, 3), np.int64)},
        ),
        (r"ids must have the shape", {"ids": np.zeros(5, np.int64)}),
        (r"ids is neither .* but a list", {"ids": [[1]]}),
        (r"x is neither .* but a list", {"x": [1.0]}),
        (r"x is neither .* but a NoneType", {"x": None}),
        (r"ids must be int32, int64, int8, uint8 or int16", {"ids": np.zeros((5, 3), np.float32)}),
        (
            r"weights must be .* of shape \[5, 3\], got float32 \[5, 2\]",
            {"weights": np.zeros((5, 2), "f4")},
        ),
        (r"weights must be fp32, bf16 or fp16", {"weights": np.zeros((5, 3))}),
        (r"skip must be bool of shape \[6\], got bool \[1\]", {"skip": np.zeros(1, bool)}),
        (r"skip must be bool", {"skip": np.zeros(6, np.int64)}),
        (r"add_to must be .* got float32 \[4, 256\]", {"add_to": np.zeros((4, 256), "f4")}),
        (r"out must be bf16, fp16 or fp32 of shape", {"out": np.zeros((5, 256))}),
        (r"out must be contiguous, and not read-only", {"out": np.zeros((256, 5), "f4").T}),
        (r"out must be contiguous, and not read-only", {"out": READ_ONLY}),
    ],
)
def test_refusals(make_layer: Make, match: str, changed: dict[str, Any]) -> None:
    """By a call at once, by a submission when the result is waited for."""
    x, ids, weights = batch()
    given: dict[str, Any] = {"x": x, "ids": ids, "weights": weights} | changed
    layer = make_layer()
    with pytest.raises(UsageError, match=match):
        layer(**given)
    handle = layer.submit(**given)
    with pytest.raises(UsageError, match=match):
        handle.wait()
