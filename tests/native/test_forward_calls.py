"""What one call of a layer may be given: dtypes of x and y, experts to skip, a sum to add to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Pool
from ktconv.runtime.layers import Experts, pack_experts

Array = NDArray[Any]
HIDDEN, INNER, EXPERTS, TOP_K = 192, 128, 6, 3
DTYPES = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(3, nodes=[0, 0, 1])
    yield made
    made.close()


def layer(
    method: str = "gint4-32", parts: int = 2, here: list[int | None] | None = None
) -> Experts:
    def matrices(index: int) -> Any:
        rng = np.random.default_rng([3, index])
        return tuple(
            rng.standard_normal(shape, np.float32) * np.float32(0.1)
            for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        )

    there = list(range(EXPERTS)) if here is None else here
    return pack_experts(FORMATS[method], matrices, there, HIDDEN, INNER, parts=parts)


def batch(tokens: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """x float32, ids, weights."""
    rng = np.random.default_rng([seed, tokens])
    x = rng.standard_normal((tokens, HIDDEN), np.float32)
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int64)
    return x, np.ascontiguousarray(ids), rng.random((tokens, TOP_K), np.float32)


def call(
    of: Experts, pool: Pool, x: Array, ids: Array, weights: Array, y: Array, **more: Any
) -> Array:
    scratch = of.layer.scratch(len(ids), ids.shape[1], pool)
    scratch[:] = 0xFF  # NaN, if anything reads what it has not written
    of.layer.call(pool, x, ids, weights, y, scratch, **more)()
    return y


def stored(values: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        return f32_to_bf16(values) if dtype == "bf16" else values.astype(DTYPES[dtype])


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("method", ["int8", "gint4-32", "bf16"])
def test_every_dtype_of_x_gives_the_bits_of_its_bf16(
    kernel_level: str, pool: Pool, method: str, tokens: int
) -> None:
    of, (x, ids, weights) = layer(method), batch(tokens)
    for dtype in DTYPES:
        given = stored(x, dtype)
        wide = bf16_to_f32(given) if dtype == "bf16" else given.astype(np.float32)
        expected = of.forward(f32_to_bf16(wide), ids, weights, pool)
        found = call(of, pool, given, ids, weights, np.empty((tokens, HIDDEN), np.uint16))
        assert np.array_equal(found, expected), dtype


@pytest.mark.parametrize("tokens", [1, 37])
def test_y_is_the_float32_sum_rounded_once(kernel_level: str, pool: Pool, tokens: int) -> None:
    of, (x, ids, weights) = layer(), batch(tokens)
    x = stored(x, "bf16")
    exact = call(of, pool, x, ids, weights, np.empty((tokens, HIDDEN), np.float32))
    for dtype, kind in DTYPES.items():
        found = call(of, pool, x, ids, weights, np.empty((tokens, HIDDEN), kind))
        assert np.array_equal(found, stored(exact, dtype)), dtype


def test_float16_of_every_magnitude(kernel_level: str, pool: Pool) -> None:
    """Halves of steps, denormals, the largest numbers and beyond, infinity, NaN, zeros."""
    of, ids = layer(), np.full((1, 1), -1, np.int64)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1:] + halves[:-1]) / 2
    near = [np.nextafter(between, np.float32(side)) for side in (0, np.inf)]
    odd = np.array([65519.996, 65520, 1e38, np.inf, np.nan, 1e-40, 0], np.float32)
    values = np.concatenate([halves, between, *near, odd])
    values = np.concatenate([values, -values])
    values = np.pad(values, (0, -len(values) % HIDDEN)).reshape(-1, HIDDEN)
    many = np.repeat(ids, len(values), axis=0)
    x, weights = np.zeros(values.shape, np.uint16), np.ones(many.shape, np.float32)
    y = call(of, pool, x, many, weights, np.empty(values.shape, np.float16), add=values)
    expected = stored(np.float32(0) + values, "f16")  # the sum of no experts is +0
    nan = np.isnan(values)
    assert np.array_equal(np.isnan(y), nan)
    assert np.array_equal(y.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


def test_skipped_experts_are_as_ids_of_none(kernel_level: str, pool: Pool) -> None:
    of, (x, ids, weights) = layer(), batch(9)
    x, skip = stored(x, "bf16"), np.zeros(EXPERTS, bool)
    skip[[0, 3]] = True
    expected = of.forward(x, np.where(skip[ids], -1, ids), weights, pool)
    assert np.array_equal(call(of, pool, x, ids, weights, np.empty_like(x), skip=skip), expected)
    scratch, y = of.layer.scratch(len(ids), ids.shape[1], pool), np.empty_like(x)
    run = of.layer.call(pool, x, ids, weights, y, scratch, skip=skip)
    skip[:] = True  # the mask is read at each call
    run()
    assert not y.any()


def test_an_expert_without_weights_may_be_skipped(pool: Pool) -> None:
    of, (x, ids, weights) = layer(here=[0, None, 2, 3, 4, None]), batch(9)
    x, skip = stored(x, "bf16"), np.zeros(EXPERTS, bool)
    with pytest.raises(ValueError, match="expert that has no weights here"):
        call(of, pool, x, ids, weights, np.empty_like(x), skip=skip)
    skip[[1, 5]] = True
    y = call(of, pool, x, ids, weights, np.empty_like(x), skip=skip)
    whole = layer().forward(x, np.where(skip[ids], -1, ids), weights, pool)
    assert np.array_equal(y, whole)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("tokens", [1, 37])
def test_the_sum_begins_with_add(kernel_level: str, pool: Pool, parts: int, tokens: int) -> None:
    """Part 0 and `add` first, then the other parts; one rounding."""
    of, (x, ids, weights) = layer(parts=parts), batch(tokens)
    x, add = stored(x, "bf16"), batch(tokens, seed=1)[0] * np.float32(1e3)
    y = call(of, pool, x, ids, weights, np.empty((tokens, HIDDEN), np.float32), add=add)
    alone = call(of, pool, x, ids, weights, np.empty((tokens, HIDDEN), np.float32))
    assert np.abs(y - (alone + add)).max() <= np.abs(add).max() * 2.0**-22
    if parts == 1:
        assert np.array_equal(y, alone + add)
    rounded = call(of, pool, x, ids, weights, np.empty_like(x), add=add)
    assert np.array_equal(rounded, f32_to_bf16(y))
    in_place = add.copy()
    assert np.array_equal(call(of, pool, x, ids, weights, in_place, add=in_place), y)


def test_y_may_be_x(pool: Pool) -> None:
    of, (x, ids, weights) = layer(), batch(2051)
    x = stored(x, "bf16")
    expected = of.forward(x, ids, weights, pool)
    assert np.array_equal(call(of, pool, x, ids, weights, x), expected)


def test_what_a_call_refuses(pool: Pool) -> None:
    of, (x, ids, weights) = layer(), batch(2)
    y, scratch = np.empty_like(x), of.layer.scratch(2, TOP_K, pool)

    def refused(match: str, **changed: Any) -> None:
        given = {"x": x, "y": y} | {k: v for k, v in changed.items() if k in "xy"}
        more = {k: v for k, v in changed.items() if k not in "xy"}
        with pytest.raises(ValueError, match=match):
            of.layer.call(pool, given["x"], ids, weights, given["y"], scratch, **more)

    refused("x must be uint16, float16 or float32", x=x.astype(np.float64))
    refused("y must be uint16, float16 or float32", y=np.zeros(y.shape, np.int32))
    refused("skip must be contiguous bool", skip=np.zeros(EXPERTS - 1, bool))
    refused("skip must be contiguous bool", skip=np.zeros(EXPERTS, np.uint8))
    refused("add must be contiguous float32", add=x[:1])
    refused("add must be contiguous float32", add=x.astype(np.float16))


def test_batches_of_a_call_have_their_own_rows(pool: Pool) -> None:
    """kt_moe_forward works through 2048 tokens at a time."""
    of, (x, ids, weights) = layer("int8"), batch(2051)
    add, x = batch(2051, seed=1)[0], x.astype(np.float16)
    y = call(of, pool, x, ids, weights, np.empty(x.shape, np.float32), add=add)
    for rows in (slice(0, 3), slice(2046, 2051)):
        expected = np.empty_like(y[rows])
        call(of, pool, x[rows], ids[rows], weights[rows], expected, add=add[rows])
        assert np.array_equal(expected, y[rows])


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 2], [0, 0, 1, 2, 2]], ids=str)
def test_any_scratch_that_is_large_enough(nodes: list[int], parts: int) -> None:
    """Regions of scratch end at pages, huge ones from 2 MiB on; parts may be fewer than nodes."""
    of, (x, ids, weights) = layer(parts=parts), batch(9)
    pool, alone = Pool(len(nodes), nodes=nodes), Pool(1)
    expected = call(of, alone, x, ids, weights, np.empty_like(x))
    least = of.layer.scratch_size(9, TOP_K, pool)
    teams = min(parts, nodes[-1] + 1)
    huge = teams * (2 << 20)
    sizes = {least, least + 64, least + 4096 * teams, huge - 64, huge, huge + 64, 3 * huge - 64}
    for size in sorted(size for size in sizes if size >= least):
        room = native.aligned_bytes(size + 128)
        room[:] = 0xFF
        y = np.empty_like(x)
        of.layer.call(pool, x, ids, weights, y, room[64 : 64 + size])()
        assert np.array_equal(y, expected), size
        assert (room[:64] == 0xFF).all() and (room[64 + size :] == 0xFF).all(), size
    with pytest.raises(ValueError):
        of.layer.call(pool, x, ids, weights, y, native.aligned_bytes(least - 1))()
    pool.close()
    alone.close()
