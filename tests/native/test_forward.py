"""The MoE forward: right against float32, the same bits however the work is shared out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.moe import METHODS, Experts, pack_experts
from ktconv.native import Activation, Layer, Pool, Projection

Array = NDArray[Any]

# Methods whose results are the same bits on every level.
EXACT = ("int4", "int8", "gint4-32", "gint4-64", "gint4-128")
OTHERS = ("bf16", "fp8", "fp8-channel", "mxfp4")
# hidden, intermediate, experts, top-k, parts
LAYERS = [(256, 256, 4, 2, 1), (384, 512, 5, 3, 2), (128, 512, 3, 3, 4), (1152, 128, 1, 1, 1)]


def weights_of(seed: int, hidden: int, intermediate: int) -> Any:
    """Gaussian matrices by expert; the same call gives the same numbers."""

    def expert(index: int) -> tuple[Array, Array, Array]:
        rng = np.random.default_rng([seed, index])

        def matrix(rows: int, cols: int) -> Array:
            values = rng.standard_normal((rows, cols), np.float32) * np.float32(cols**-0.5)
            return bf16_to_f32(f32_to_bf16(values))

        return (
            matrix(intermediate, hidden),
            matrix(intermediate, hidden),
            matrix(hidden, intermediate),
        )

    return expert


@cache
def packed(
    method: str, hidden: int, intermediate: int, experts: int, parts: int, activation: Activation
) -> Experts:
    source = weights_of(7, hidden, intermediate)
    return pack_experts(
        METHODS[method],
        source,
        list(range(experts)),
        hidden,
        intermediate,
        parts=parts,
        activation=activation,
    )


def make(
    method: str,
    hidden: int,
    intermediate: int,
    experts: int,
    parts: int,
    activation: Activation | None = None,
    ids: list[int | None] | None = None,
) -> Experts:
    """Random experts; `ids` says which of them are here."""
    if ids is None:
        chosen = activation or Activation()
        return packed(method, hidden, intermediate, experts, parts, chosen)
    source = weights_of(7, hidden, intermediate)
    return pack_experts(METHODS[method], source, ids, hidden, intermediate, parts=parts)


def inputs(tokens: int, hidden: int, experts: int, top_k: int, seed: int = 0) -> tuple[Array, ...]:
    """x bf16 bits, ids, routing weights."""
    rng = np.random.default_rng([seed, tokens])
    x = f32_to_bf16(rng.standard_normal((tokens, hidden), np.float32))
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int64)
    return x, np.ascontiguousarray(ids), rng.random((tokens, top_k), np.float32)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, Pool]]:
    made = {
        "one": Pool(1),
        "two": Pool(2),
        "five": Pool(5),
        "nodes": Pool(4, nodes=[0, 0, 0, 1]),
        "many nodes": Pool(3, nodes=[0, 1, 2]),
    }
    yield made
    for pool in made.values():
        pool.close()


def relative(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(bf16_to_f32(got) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("method", [*EXACT, *OTHERS])
@pytest.mark.parametrize(("hidden", "intermediate", "experts", "top_k", "parts"), LAYERS)
@pytest.mark.parametrize("tokens", [1, 3, 17, 40])
def test_truth(
    isa: str,
    pools: dict[str, Pool],
    method: str,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    parts: int,
    tokens: int,
) -> None:
    layer = make(method, hidden, intermediate, experts, parts)
    x, ids, weights = inputs(tokens, hidden, experts, top_k)
    y = layer.forward(x, ids, weights, pools["two"])
    assert relative(y, layer.reference(x, ids, weights)) < METHODS[method].bound


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("tokens", [*range(1, 34), 100])
def test_all_levels_agree(tiles: object, pools: dict[str, Pool], method: str, tokens: int) -> None:
    layer = make(method, 256, 384, 3, 1)
    x, ids, weights = inputs(tokens, 256, 3, 2)
    before, found = native.isa(), []
    for level in native.isa_available():
        native.use_isa(level)
        found.append(layer.forward(x, ids, weights, pools["two"]))
    native.use_isa(before)
    assert len(found) > 1 or native.isa_available() == ["scalar"]
    assert all(np.array_equal(y, found[0]) for y in found[1:])


@pytest.mark.parametrize("method", ["int4", "gint4-32", "bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_threads_and_nodes_do_not_matter(
    isa: str, pools: dict[str, Pool], method: str, parts: int, tokens: int
) -> None:
    layer = make(method, 256, 512, 4, parts)
    x, ids, weights = inputs(tokens, 256, 4, 3)
    expected = layer.forward(x, ids, weights, pools["one"])
    for name, pool in pools.items():
        assert np.array_equal(layer.forward(x, ids, weights, pool), expected), name


@pytest.mark.parametrize("method", ["int8", "bf16"])
def test_several_blocks_of_tokens(pools: dict[str, Pool], method: str) -> None:
    """An expert with more tokens than one product takes."""
    layer = make(method, 128, 256, 2, 1)
    x, ids, weights = inputs(205, 128, 2, 2)
    expected = layer.forward(x, ids, weights, pools["one"])
    assert relative(expected, layer.reference(x, ids, weights)) < METHODS[method].bound
    assert np.array_equal(layer.forward(x, ids, weights, pools["five"]), expected)


@pytest.mark.parametrize("method", [*EXACT, *OTHERS])
def test_the_batch_does_not_matter(isa: str, pools: dict[str, Pool], method: str) -> None:
    if isa == "amx" and method == "bf16":
        pytest.skip("AMX sums even and odd columns apart, few tokens are left to AVX-512")
    layer = make(method, 256, 256, 4, 1)
    x, ids, weights = inputs(60, 256, 4, 2)
    together = layer.forward(x, ids, weights, pools["two"])
    for first, end in ((0, 1), (5, 7), (20, 33), (59, 60)):
        alone = layer.forward(x[first:end], ids[first:end], weights[first:end], pools["two"])
        assert np.array_equal(alone, together[first:end])


@pytest.mark.parametrize("method", ["int8", "bf16"])
def test_more_tokens_than_a_batch(pools: dict[str, Pool], method: str) -> None:
    """kt_moe_forward works through 2048 tokens at a time."""
    layer = make(method, 128, 128, 2, 1)
    x, ids, weights = inputs(4100, 128, 2, 2)
    y = layer.forward(x, ids, weights, pools["two"])
    for first, end in ((0, 9), (2040, 2060), (4090, 4100)):
        alone = layer.forward(x[first:end], ids[first:end], weights[first:end], pools["one"])
        assert np.array_equal(alone, y[first:end])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_experts_that_live_elsewhere(isa: str, pools: dict[str, Pool], dtype: Any) -> None:
    """-1 is skipped, and experts that are not here need no memory."""
    layer = make("int4", 256, 256, 4, 2, ids=[0, None, 2, None])
    x, _, weights = inputs(5, 256, 4, 3)
    ids = np.array([[-1, 0, 2], [2, -1, -1], [-1, -1, -1], [0, 2, -1], [-1, -1, 0]], dtype)
    y = layer.forward(x, ids, weights, pools["two"])
    assert not y[2].any()
    assert relative(y, layer.reference(x, ids, weights)) < METHODS["int4"].bound


def test_an_expert_without_weights_is_refused(pools: dict[str, Pool]) -> None:
    layer = make("int4", 256, 256, 3, 1, ids=[0, None, 2])
    x, _, weights = inputs(1, 256, 3, 1)
    with pytest.raises(ValueError, match="expert"):
        layer.forward(x, np.array([[1]], np.int64), weights, pools["one"])


def test_all_tokens_to_one_expert(isa: str, pools: dict[str, Pool]) -> None:
    layer = make("int8", 128, 256, 4, 1)
    x, _, weights = inputs(33, 128, 4, 1)
    ids = np.full((33, 1), 3, np.int64)
    y = layer.forward(x, ids, weights, pools["five"])
    assert relative(y, layer.reference(x, ids, weights)) < METHODS["int8"].bound


def test_the_same_expert_twice_counts_twice(pools: dict[str, Pool]) -> None:
    layer = make("bf16", 128, 128, 2, 1)
    x, _, weights = inputs(2, 128, 2, 2)
    ids = np.array([[1, 1], [0, 1]], np.int64)
    y = layer.forward(x, ids, weights, pools["two"])
    assert relative(y, layer.reference(x, ids, weights)) < METHODS["bf16"].bound


@pytest.mark.parametrize("bad", [-2, 4, 1 << 40])
def test_ids_out_of_range_are_refused(pools: dict[str, Pool], bad: int) -> None:
    layer = make("int8", 128, 128, 4, 1)
    x, ids, weights = inputs(3, 128, 4, 2)
    ids[2, 1] = bad
    with pytest.raises(ValueError, match="expert"):
        layer.forward(x, ids, weights, pools["two"])


ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "gpt-oss": Activation("swiglu", 1.702, 1.0, 7.0),
    "limit": Activation(limit=0.5),
}


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations(isa: str, pools: dict[str, Pool], name: str) -> None:
    layer = make("bf16", 256, 256, 3, 1, activation=ACTIVATIONS[name])
    x, ids, weights = inputs(20, 256, 3, 2)
    x = f32_to_bf16(bf16_to_f32(x) * np.float32(5))  # far into saturation and limits
    y = layer.forward(x, ids, weights, pools["two"])
    assert relative(y, layer.reference(x, ids, weights)) < METHODS["bf16"].bound


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_are_the_same_bits_on_every_level(pools: dict[str, Pool], name: str) -> None:
    layer = make("int8", 256, 256, 3, 1, activation=ACTIVATIONS[name])
    x, ids, weights = inputs(20, 256, 3, 2)
    x = f32_to_bf16(bf16_to_f32(x) * np.float32(20))
    before, found = native.isa(), []
    for level in ("scalar", before):
        native.use_isa(level)
        found.append(layer.forward(x, ids, weights, pools["two"]))
    native.use_isa(before)
    assert np.array_equal(found[0], found[1])


def test_biases(isa: str, pools: dict[str, Pool]) -> None:
    """gpt-oss: gate, up and down have one; that of down is added once, whatever the parts."""
    hidden, intermediate, parts = 128, 256, 2
    layer = make("bf16", hidden, intermediate, 2, parts)
    rng = np.random.default_rng(5)
    gate, up = rng.standard_normal((2, 2, intermediate), np.float32)
    down = rng.standard_normal((2, hidden), np.float32)
    width = intermediate // parts
    rows: list[list[Any]] = []
    for part, row in enumerate(layer.layer._keep):
        cut = slice(part * width, (part + 1) * width)
        rows.append([])
        for e, matrices in enumerate(row):
            assert matrices is not None
            biases = (gate[e, cut].copy(), up[e, cut].copy(), None if part else down[e])
            rows[-1].append(
                tuple(
                    Projection(matrix.codes, matrix.scale, bias)
                    for matrix, bias in zip(matrices, biases, strict=True)
                )
            )
    biased = Layer(layer.layer.layout, Activation(), hidden, intermediate, rows)
    x, ids, weights = inputs(9, hidden, 2, 2)
    y, scratch = np.empty_like(x), biased.scratch(9, 2, pools["two"])
    biased.call(pools["two"], x, ids, weights, y, scratch)()
    wide, expected = bf16_to_f32(x), np.zeros((9, hidden), np.float32)
    for e in range(2):
        matrices = layer.values(e)
        token, slot = np.nonzero(ids == e)
        g = wide[token] @ matrices[0].T + gate[e]
        u = wide[token] @ matrices[1].T + up[e]
        product = (g / (1 + np.exp(-g)) * u) @ matrices[2].T + down[e]
        np.add.at(expected, token, weights[token, slot, None] * product)
    assert relative(y, expected) < METHODS["bf16"].bound


def test_nonfinite_inputs_stay_in_their_token(isa: str, pools: dict[str, Pool]) -> None:
    for method in ("int4", "bf16", "gint4-32"):
        layer = make(method, 128, 128, 2, 1)
        x, ids, weights = inputs(14, 128, 2, 2)
        x[3, 5], x[11, 100] = 0x7FC0, 0xFF80
        y = bf16_to_f32(layer.forward(x, ids, weights, pools["two"]))
        assert np.isnan(y[3]).all()
        assert np.isnan(y[11]).any()
        assert np.isfinite(np.delete(y, [3, 11], axis=0)).all()


def test_zero_tokens_inputs_and_scratch_are_checked(pools: dict[str, Pool]) -> None:
    layer = make("int8", 128, 128, 2, 1).layer
    x, ids, weights = inputs(2, 128, 2, 2)
    y, scratch = np.empty_like(x), layer.scratch(2, 2, pools["two"])
    with pytest.raises(ValueError, match="scratch"):
        layer.call(pools["two"], x, ids, weights, y, scratch[: len(scratch) // 2])()
    with pytest.raises(ValueError, match="x must be"):
        layer.call(pools["two"], x[:, :64], ids, weights, y, scratch)
    with pytest.raises(ValueError, match="ids must be"):
        layer.call(pools["two"], x, ids.astype(np.int16), weights, y, scratch)
    with pytest.raises(ValueError, match="weights must be"):
        layer.call(pools["two"], x, ids, weights.astype(np.float64), y, scratch)


def test_the_callers_float_mode_does_not_matter(pools: dict[str, Pool]) -> None:
    """A library that switched flush-to-zero on (some do on import) changes nothing."""
    torch = pytest.importorskip("torch")
    layer = make("bf16", 128, 128, 2, 1)
    x, ids, weights = inputs(3, 128, 2, 2)
    x = f32_to_bf16(bf16_to_f32(x) * np.float32(1e-25))
    expected = layer.forward(x, ids, weights, pools["one"])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        assert np.array_equal(layer.forward(x, ids, weights, pools["one"]), expected)
    finally:
        torch.set_flush_denormal(False)


def test_touching_changes_nothing(pools: dict[str, Pool]) -> None:
    layer = make("int4", 256, 256, 3, 2, ids=[0, None, 2])
    for pool in pools.values():
        layer.layer.touch(pool)
