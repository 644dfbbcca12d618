"""Many threads, layers and pools in one process: nothing is shared but weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ktconv.formats import FORMATS
from ktconv.runtime import Handle, MoELayer, Pool, free_workspaces
from ktconv.runtime.layers import pack_experts
from ktconv.system.arrays import F32

from .conftest import EXPERTS, HIDDEN, TOP_K, batch

pytestmark = pytest.mark.slow

Make = Callable[..., MoELayer]
THREADS, ROUNDS = 8, 12


def of_shape(method: str, sizes: tuple[int, int, int], pool: Pool, **more: Any) -> MoELayer:
    experts, hidden, inner = sizes

    def matrices(index: int) -> Any:
        rng = np.random.default_rng([hidden, index])
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)

    origins = list(range(experts))
    return MoELayer(pack_experts(FORMATS[method], matrices, origins, hidden, inner, **more), pool)


def test_many_threads_give_the_bits_of_one(make_layer: Make, pool: Pool) -> None:
    """8 threads on 3 layers and 2 pools, calling and submitting, with batches of many sizes."""
    layers = [make_layer("int8", parts=2), make_layer("int4"), make_layer("bf16")]
    work = [
        (n, batch(1 + (5 * thread + 3 * n + turn) % 17, thread), thread % 3, turn % 2)
        for thread in range(THREADS)
        for turn in range(ROUNDS)
        for n in range(len(layers))
    ]
    expected = [layers[n](*one) for n, one, _, _ in work]

    def compute(thread: int, pools: tuple[Pool, Pool]) -> list[F32]:
        found: list[F32 | Handle] = []
        mine = len(work) // THREADS
        for n, one, kind, which in work[thread * mine : (thread + 1) * mine]:
            layer = MoELayer(layers[n]._packed, pools[which])
            out = np.empty_like(one[0]) if kind == 1 else None
            found.append(layer.submit(*one, out=out) if kind == 2 else layer(*one, out=out))
        return [y.wait() if isinstance(y, Handle) else y for y in found]

    with Pool(3) as other, ThreadPoolExecutor(THREADS) as threads:
        each = [threads.submit(compute, thread, (pool, other)) for thread in range(THREADS)]
        found = [y for future in each for y in future.result(60)]
        assert len(other.workspaces) <= THREADS + 1
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
    assert len({y.ctypes.data for y in found}) == len(found)


SHAPES = {
    "int8": (3, 64, 64), "int4": (7, 256, 128), "bf16": (2, 128, 320), "fp8": (4, 384, 128),
    "mxfp4": (5, 128, 64), "gint4-32": (1, 320, 192), "fp8-channel": (16, 64, 512),
}  # fmt: skip


def test_layers_of_many_shapes(pool: Pool) -> None:
    """D12: nothing of the first one is kept for the others, in whatever order they are called."""
    layers = [of_shape(method, sizes, pool) for method, sizes in SHAPES.items()]

    def computed(layer: MoELayer, tokens: int) -> F32:
        rng = np.random.default_rng([layer.hidden, tokens])
        top_k = min(layer.experts, 1 + tokens % 3)
        x = rng.standard_normal((tokens, layer.hidden), np.float32)
        ids = np.argsort(rng.random((tokens, layer.experts)), axis=1)[:, :top_k]
        return np.array(layer(x, ids, rng.random((tokens, top_k), np.float32)))

    order = [(layer, tokens) for tokens in (1, 40, 3) for layer in layers]
    found = [computed(*one) for one in order]
    for (layer, tokens), y in reversed(list(zip(order, found, strict=True))):
        free_workspaces(pool)
        assert y.shape == (tokens, layer.hidden)
        assert np.array_equal(computed(layer, tokens), y) and y.any()


def test_pools_of_many_sizes(make_layer: Make) -> None:
    """D12: each keeps its own number of threads; the bits are the same on all."""
    layer, one = make_layer("int8", parts=2), batch(23)
    expected = layer(*one)
    pools = [Pool(threads) for threads in (1, 3, 2, 5)]
    assert [pool.threads for pool in pools] == [1, 3, 2, 5]
    for pool in [*pools, *reversed(pools)]:
        assert np.array_equal(MoELayer(layer._packed, pool)(*one), expected)
    for pool in pools:
        pool.close()
    assert np.array_equal(layer(*one), expected)


def test_layers_that_go_away(pool: Pool) -> None:
    """With calls in flight, whose results stay."""
    one = batch(4)
    expected = of_shape("int8", (EXPERTS, HIDDEN, 128), pool)(*one)
    handles = []
    for _ in range(3):
        handles.append(of_shape("int8", (EXPERTS, HIDDEN, 128), pool).submit(*one))
        gc.collect()
    assert all(np.array_equal(handle.wait(), expected) for handle in handles)


def test_more_experts_per_token_than_there_are(make_layer: Make) -> None:
    """D18: a slot is a slot; what repeats counts again, and what is no expert does not count."""
    layer, (x, _, _) = make_layer(), batch(2)
    ids = np.tile(np.arange(-1, EXPERTS + 2), (2, 3))
    weights = np.random.default_rng(0).random(ids.shape, np.float32)
    assert ids.shape[1] > EXPERTS
    real = np.flatnonzero((ids[0] >= 0) & (ids[0] < EXPERTS))
    assert np.array_equal(layer(x, ids, weights), layer(x, ids[:, real], weights[:, real]))


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_weights_are_used_as_they_are(make_layer: Make, tokens: int) -> None:
    """D16: in fp32, neither rounded to bf16 nor brought to a sum of 1."""
    layer, (x, ids, _) = make_layer(), batch(tokens)
    weights = np.full((tokens, TOP_K), 1 + 2**-12, np.float32)  # bf16 has 8 bits
    ones = np.ones_like(weights)
    y = layer(x, ids, ones)
    assert np.allclose(layer(x, ids, weights), y * weights[0, 0], atol=1e-5)
    assert np.abs(layer(x, ids, weights) - y).max() > 1e-4
    assert np.array_equal(layer(x, ids, 4 * ones), 4 * y)
