"""The MoE forward: right against float32, the same bits however the work is shared out."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.levels import at_level
from ktconv._native import ffi, lib
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Activation, Layer, Layout, PackedMatrix, Pool
from ktconv.runtime.layers import KERNEL_BOUND, Experts, pack_experts
from ktconv.runtime.layers.experts import check_shape, gated, round_activations

pytestmark = pytest.mark.slow

Array = NDArray[Any]

# Methods whose results are the same bits on every level.
EXACT = ("int4", "int8", "gint4-32", "gint4-64", "gint4-128", "gint8-64")
OTHERS = ("bf16", "fp8", "fp8-channel", "mxfp4", "mxfp8", "nvfp4")
# hidden, intermediate, experts, top-k, parts
LAYERS = [(256, 256, 4, 2, 1), (384, 256, 5, 3, 2), (128, 512, 3, 3, 4), (1152, 128, 1, 1, 1)]
TOKENS = [1, 3, 17, 40]


def weights_of(seed: int, hidden: int, intermediate: int, gated: bool = True) -> Any:
    """Gaussian matrices by expert; the same call gives the same numbers."""

    def expert(index: int) -> tuple[Array | None, Array, Array]:
        rng = np.random.default_rng([seed, index])

        def matrix(rows: int, cols: int) -> Array:
            values = rng.standard_normal((rows, cols), np.float32) * np.float32(cols**-0.5)
            return bf16_to_f32(f32_to_bf16(values))

        return (
            matrix(intermediate, hidden) if gated else None,
            matrix(intermediate, hidden),
            matrix(hidden, intermediate),
        )

    return expert


@cache
def packed(
    method: str, hidden: int, intermediate: int, experts: int, parts: int, activation: Activation
) -> Experts:
    source = weights_of(7, hidden, intermediate, activation.gated)
    return pack_experts(
        FORMATS[method],
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
    return pack_experts(FORMATS[method], source, ids, hidden, intermediate, parts=parts)


def inputs(
    tokens: int, hidden: int, experts: int, top_k: int, seed: int = 0
) -> tuple[Array, Array, Array]:
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


def assert_true(layer: Experts, y: Array, x: Array, ids: Array, weights: Array) -> None:
    """y is that of the readable truth, with activations rounded where the kernels round them."""
    assert relative(y, layer.reference(x, ids, weights, rounded=True)) < KERNEL_BOUND


@pytest.mark.parametrize(("hidden", "intermediate", "experts", "top_k", "parts"), LAYERS)
@pytest.mark.parametrize("method", [*EXACT, *OTHERS])
def test_forward_is_near_the_reference(
    kernel_level: str,
    pools: dict[str, Pool],
    method: str,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    parts: int,
) -> None:
    layer = make(method, hidden, intermediate, experts, parts)
    x, ids, weights, expected = with_reference(method, hidden, intermediate, experts, top_k, parts)
    for tokens in TOKENS:
        y = layer.forward(x[:tokens], ids[:tokens], weights[:tokens], pools["two"])
        assert relative(y, expected[:tokens]) < KERNEL_BOUND, tokens


@cache
def with_reference(
    method: str, hidden: int, intermediate: int, experts: int, top_k: int, parts: int
) -> tuple[Array, Array, Array, Array]:
    """Inputs and what every level must compute from them, of the most tokens: what is computed
    for a token does not depend on others."""
    given = inputs(TOKENS[-1], hidden, experts, top_k)
    layer = make(method, hidden, intermediate, experts, parts)
    return *given, layer.reference(*given, rounded=True)


def test_levels_with_kernels_of_their_own() -> None:
    for method in FORMATS.values():
        levels = native.kernel_levels(method.layout)
        assert levels[0] == "scalar" and set(levels) <= set(native.isa_available())
        assert "neon" not in levels
        assert ("avx2" in levels) == ("avx2" in native.isa_available())
        assert ("amx" in levels) == ("amx" in native.isa_available())
        assert ("avx512" in levels) == ("avx512" in native.isa_available())
    no_kernels = Layout("gint4", 96)
    assert native.kernel_levels(no_kernels) == native.kernel_levels() == []


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("tokens", [*range(1, 34), 100])
def test_all_levels_agree(tiles: object, pools: dict[str, Pool], method: str, tokens: int) -> None:
    layer = make(method, 256, 128, 3, 1)
    x, ids, weights = inputs(tokens, 256, 3, 2)
    found = []
    levels = native.kernel_levels(FORMATS[method].layout)
    for level in levels:
        with at_level(level):
            found.append(layer.forward(x, ids, weights, pools["two"]))
    assert len(found) > 1 or levels == ["scalar"]
    assert all(np.array_equal(y, found[0]) for y in found[1:])


@pytest.mark.parametrize("method", ["int4", "gint4-32", "bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize(
    ("parts", "tokens"),
    [(1, 24), (2, 1), (2, 24), (4, 6)],  # 24: 18 for an expert, more than an AMX tile's 16
)
def test_threads_and_nodes_do_not_matter(
    kernel_level: str, pools: dict[str, Pool], method: str, parts: int, tokens: int
) -> None:
    layer = make(method, 128, 128 * max(parts, 2), 4, parts)
    x, ids, weights = inputs(tokens, 128, 4, 3)
    expected = layer.forward(x, ids, weights, pools["one"])
    for name in pools.keys() - {"one"}:
        assert np.array_equal(layer.forward(x, ids, weights, pools[name]), expected), name


@pytest.mark.parametrize("method", ["int8", "bf16"])
def test_several_blocks_of_tokens(pools: dict[str, Pool], method: str) -> None:
    """An expert with more tokens than one product takes."""
    layer = make(method, 128, 256, 2, 1)
    x, ids, weights = inputs(205, 128, 2, 2)
    expected = layer.forward(x, ids, weights, pools["one"])
    assert_true(layer, expected, x, ids, weights)
    assert np.array_equal(layer.forward(x, ids, weights, pools["five"]), expected)


@pytest.mark.parametrize("method", [*EXACT, *OTHERS])
def test_the_batch_does_not_matter(kernel_level: str, pools: dict[str, Pool], method: str) -> None:
    if kernel_level == "amx" and method == "bf16":
        pytest.skip("AMX sums even and odd columns apart, few tokens are left to AVX-512")
    layer = make(method, 256, 256, 4, 1)
    x, ids, weights = inputs(60, 256, 4, 2)
    together = layer.forward(x, ids, weights, pools["two"])
    for first, end in ((0, 1), (5, 7), (20, 33), (59, 60)):
        alone = layer.forward(x[first:end], ids[first:end], weights[first:end], pools["two"])
        assert np.array_equal(alone, together[first:end])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("method", ["int8", "bf16"])
def test_more_tokens_than_a_batch(pools: dict[str, Pool], method: str, dtype: Any) -> None:
    """kt_moe_forward works through 2048 tokens at a time."""
    layer = make(method, 128, 128, 2, 1)
    x, ids, weights = inputs(4100, 128, 2, 2)
    ids = ids.astype(dtype)
    y = layer.forward(x, ids, weights, pools["two"])
    for first, end in ((0, 9), (2040, 2060), (4090, 4100)):
        alone = layer.forward(x[first:end], ids[first:end], weights[first:end], pools["one"])
        assert np.array_equal(alone, y[first:end])


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_gathered_in_one_batch_are_not_those_of_the_next(
    pools: dict[str, Pool], parts: int
) -> None:
    """The same slots of the same expert, other tokens."""
    layer = make("int8", 128, 128, 2, parts) if parts == 1 else make("bf16", 128, 128, 2, parts)
    x, ids, weights = inputs(2200, 128, 2, 1)
    ids[:] = -1
    ids[0:60:2], ids[2049:2139:3] = 0, 0
    y = layer.forward(x, ids, weights, pools["one"])
    assert_true(layer, y, x, ids, weights)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_experts_that_live_elsewhere(kernel_level: str, pools: dict[str, Pool], dtype: Any) -> None:
    """-1 is skipped, and experts that are not here need no memory."""
    layer = make("int4", 256, 256, 4, 2, ids=[0, None, 2, None])
    x, _, weights = inputs(5, 256, 4, 3)
    ids = np.array([[-1, 0, 2], [2, -1, -1], [-1, -1, -1], [0, 2, -1], [-1, -1, 0]], dtype)
    y = layer.forward(x, ids, weights, pools["two"])
    assert not y[2].any()
    assert_true(layer, y, x, ids, weights)


def test_an_expert_without_weights_is_refused(pools: dict[str, Pool]) -> None:
    layer = make("int4", 256, 256, 3, 1, ids=[0, None, 2])
    x, _, weights = inputs(1, 256, 3, 1)
    with pytest.raises(ValueError, match="expert"):
        layer.forward(x, np.array([[1]], np.int64), weights, pools["one"])


def test_all_tokens_to_one_expert(kernel_level: str, pools: dict[str, Pool]) -> None:
    layer = make("int8", 128, 256, 4, 1)
    x, _, weights = inputs(33, 128, 4, 1)
    ids = np.full((33, 1), 3, np.int64)
    y = layer.forward(x, ids, weights, pools["five"])
    assert_true(layer, y, x, ids, weights)


REPEATS = {
    "once more": [[1, 1], [0, 1], [0, 2]],
    "instead of the next token": [[1, 1], [0, 2], [1, 0]],  # slots of 1: tokens 0 0 2
    "later": [[1, 0], [1, 1], [0, 2], [1, 0]],  # 0 1 1 3
    "at the end": [[1, 0], [0, 2], [1, 1]],  # 0 2 2
    "nothing else": [[1, 1], [1, 1], [1, 1]],
    "one token": [[1, 1]],
}


@pytest.mark.parametrize("method", ["int8", "int4", "bf16", "gint4-32"])
@pytest.mark.parametrize("name", REPEATS)
def test_the_same_expert_twice_counts_twice(
    kernel_level: str, pools: dict[str, Pool], method: str, name: str
) -> None:
    layer = make(method, 128, 128, 3, 1)
    ids = np.array(REPEATS[name], np.int64)
    x, _, weights = inputs(len(ids), 128, 3, 2)
    y = layer.forward(x, ids, weights, pools["two"])
    assert_true(layer, y, x, ids, weights)


def test_ids_drawn_without_care(kernel_level: str, pools: dict[str, Pool]) -> None:
    """Any repeats, any gaps; more choices than experts."""
    layer = make("int8", 128, 128, 3, 1)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tokens, top_k = int(rng.integers(1, 24)), int(rng.integers(1, 5))
        x, _, _ = inputs(tokens, 128, 3, 1, seed)
        ids = rng.integers(-1, 3, (tokens, top_k))
        weights = rng.random((tokens, top_k), np.float32)
        y = layer.forward(x, ids, weights, pools["two"])
        if (ids >= 0).any():
            assert_true(layer, y, x, ids, weights)
        else:
            assert not y.any()


@pytest.mark.parametrize("beyond", [-2, 4, 1 << 40, -(1 << 63)])
def test_ids_of_no_expert_are_skipped(pools: dict[str, Pool], beyond: int) -> None:
    layer = make("int8", 128, 128, 4, 1)
    x, ids, weights = inputs(3, 128, 4, 2)
    ids[2, 1] = -1
    expected = layer.forward(x, ids, weights, pools["two"])
    ids[2, 1] = beyond
    assert np.array_equal(layer.forward(x, ids, weights, pools["two"]), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_of_a_later_batch_are_checked_first(pools: dict[str, Pool], dtype: Any) -> None:
    layer = make("int8", 128, 128, 2, 1, ids=[0, None])
    x, ids, weights = inputs(2200, 128, 1, 1)
    ids = ids.astype(dtype)
    ids[2100, 0] = 1
    y, scratch = np.full_like(x, 7), layer.layer.scratch(2200, 1, pools["two"])
    with pytest.raises(ValueError, match="expert"):
        layer.layer.call(pools["two"], x, ids, weights, y, scratch)()
    assert (y == 7).all()


ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "gpt-oss": Activation("swiglu", 1.702, 1.0, 7.0),
    "limit": Activation(limit=0.5),
    "relu2": Activation("relu2"),
    "swiglu_clamped": Activation("swiglu_clamped", limit=0.5),
    "softcap": Activation("softcap", 4.0, 25.0),
    "softcap of the gate": Activation("softcap", 1.0, math.inf),
    "relu": Activation("relu"),
    "ungated_gelu": Activation("ungated_gelu"),
    "ungated_gelu_tanh": Activation("ungated_gelu_tanh", limit=2.0),
}
UNGATED = ACTIVATIONS["relu2"]


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_forward_with_every_activation(
    kernel_level: str, pools: dict[str, Pool], name: str
) -> None:
    layer = make("bf16", 256, 256, 3, 1, activation=ACTIVATIONS[name])
    x, ids, weights = inputs(20, 256, 3, 2)
    x = f32_to_bf16(bf16_to_f32(x) * np.float32(5))  # far into saturation and limits
    y = layer.forward(x, ids, weights, pools["two"])
    assert_true(layer, y, x, ids, weights)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_are_the_same_bits_on_every_level(
    tiles: object, pools: dict[str, Pool], name: str
) -> None:
    layer = make("int8", 256, 256, 3, 1, activation=ACTIVATIONS[name])
    x, ids, weights = inputs(20, 256, 3, 2)
    x = f32_to_bf16(bf16_to_f32(x) * np.float32(20))
    found = []
    levels = native.kernel_levels(FORMATS["int8"].layout)
    for level in levels:
        with at_level(level):
            found.append(layer.forward(x, ids, weights, pools["two"]))
    assert len(found) > 1 or levels == ["scalar"]
    assert all(np.array_equal(y, found[0]) for y in found[1:])


@pytest.mark.parametrize("method", [*EXACT, *OTHERS])
@pytest.mark.parametrize("parts", [1, 2])
def test_experts_without_gate(
    kernel_level: str, pools: dict[str, Pool], method: str, parts: int
) -> None:
    """Every format, several parts, few and many tokens, experts that live elsewhere."""
    layer = make(method, 256, 256, 4, parts, UNGATED)
    for tokens in (1, 40):
        x, ids, weights = inputs(tokens, 256, 4, 3)
        ids[:, 1] = -1
        y = layer.forward(x, ids, weights, pools["two"])
        assert_true(layer, y, x, ids, weights)
        assert np.array_equal(layer.forward(x, ids, weights, pools["many nodes"]), y)


def test_a_gate_too_many_or_too_few(pools: dict[str, Pool]) -> None:
    gated, ungated = (make("int8", 128, 128, 2, 1, a).layer for a in (Activation(), UNGATED))
    for layer, activation, reason in (
        (gated, UNGATED, "experts with relu2 have no gate"),
        (ungated, Activation(), "experts with swiglu need a gate"),
    ):
        with pytest.raises(ValueError, match=reason):
            Layer(layer.layout, activation, 128, 128, layer._keep)
    assert status_of(ungated, pools["two"]) == lib.KT_OK
    for name in ("gate", "gate_scale", "gate_bias"):  # any of them is one too many
        for entry in ungated._table:
            setattr(entry, name, ffi.cast(ffi.typeof(getattr(entry, name)), entry.up_scale))
        assert status_of(ungated, pools["two"]) == lib.KT_ERR_ARGUMENT
        for entry in ungated._table:
            setattr(entry, name, ffi.NULL)
    for name in ("up", "up_scale", "down", "down_scale"):
        kept = [getattr(entry, name) for entry in ungated._table]
        for entry in ungated._table:
            setattr(entry, name, ffi.NULL)
        assert status_of(ungated, pools["two"]) == lib.KT_ERR_EXPERT
        for entry, pointer in zip(ungated._table, kept, strict=True):
            setattr(entry, name, pointer)
    ungated.c.activation.function = lib.KT_SWIGLU
    assert status_of(ungated, pools["two"]) == lib.KT_ERR_EXPERT
    ungated.c.activation.function = lib.KT_RELU2


def test_which_functions_have_a_gate() -> None:
    found = {name: lib.kt_function_has_gate(code) for name, code in native.GATE_FUNCTIONS.items()}
    ungated = {name for name, has in found.items() if not has}
    assert ungated == {"relu2", "relu", "ungated_gelu", "ungated_gelu_tanh"}
    assert set(found.values()) == {0, 1}
    assert lib.kt_function_has_gate(-1) == lib.kt_function_has_gate(len(found)) == -1
    assert Activation("relu2").products == 2 and Activation("softcap").products == 3


@pytest.mark.parametrize("caps", [(0.0, 1.0), (1.0, 0.0), (-1.0, 5.0), (1.0, math.nan)])
def test_impossible_softcaps(pools: dict[str, Pool], caps: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="alpha and beta of softcap must be above 0"):
        make("int8", 128, 128, 2, 1, Activation("softcap", *caps))
    layer = make("int8", 128, 128, 3, 1, ACTIVATIONS["softcap"]).layer
    before = layer.c.activation.alpha, layer.c.activation.beta
    layer.c.activation.alpha, layer.c.activation.beta = caps
    assert lib.kt_moe_scratch_size(layer.c, 1, 1, pools["one"].c) == 0
    assert lib.kt_moe_touch(layer.c, pools["one"].c) == lib.KT_ERR_ARGUMENT
    layer.c.activation.alpha, layer.c.activation.beta = before


@pytest.mark.parametrize("number", [-1, len(native.GATE_FUNCTIONS), 1 << 30])
def test_unknown_functions(pools: dict[str, Pool], number: int) -> None:
    with pytest.raises(ValueError, match="'sine' is none of swiglu, gelu, "):
        Layer(Layout("int8"), Activation("sine"), 128, 128, [[None]])
    layer = make("int8", 128, 128, 3, 1).layer
    layer.c.activation.function = number
    assert lib.kt_moe_scratch_size(layer.c, 1, 1, pools["one"].c) == 0
    assert lib.kt_moe_touch(layer.c, pools["one"].c) == lib.KT_ERR_ARGUMENT
    layer.c.activation.function = lib.KT_SWIGLU


@pytest.mark.parametrize("name", ["silu", "relu2", "softcap", "ungated_gelu"])
def test_biases(kernel_level: str, pools: dict[str, Pool], name: str) -> None:
    """gpt-oss: every matrix has one; that of down is added once, whatever the parts."""
    hidden, intermediate, parts = 128, 256, 2
    layer = make("bf16", hidden, intermediate, 2, parts, ACTIVATIONS[name])
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
                    packed and PackedMatrix(packed.codes, packed.scale, bias)
                    for packed, bias in zip(matrices, biases, strict=True)
                )
            )
    biased = Layer(layer.layer.layout, layer.activation, hidden, intermediate, rows)
    assert biased.biased and not layer.biased
    x, ids, weights = inputs(9, hidden, 2, 2)
    y, scratch = np.empty_like(x), biased.scratch(9, 2, pools["two"])
    biased.call(pools["two"], x, ids, weights, y, scratch)()
    wide, expected = bf16_to_f32(x), np.zeros((9, hidden), np.float32)
    for e in range(2):
        w_gate, w_up, w_down = layer.loaded(e)
        token, slot = np.nonzero(ids == e)
        g = None if w_gate is None else w_gate.product(wide[token]) + gate[e]
        middle = gated(layer.activation, g, w_up.product(wide[token]) + up[e])
        product = w_down.product(round_activations(layer.format, middle)) + down[e]
        np.add.at(expected, token, weights[token, slot, None] * product)
    assert relative(y, expected) < KERNEL_BOUND


def test_nonfinite_inputs_stay_in_their_token(kernel_level: str, pools: dict[str, Pool]) -> None:
    for method in ("int4", "bf16", "gint4-32"):
        layer = make(method, 128, 128, 2, 1)
        x, ids, weights = inputs(14, 128, 2, 2)
        x[3, 5], x[11, 100] = 0x7FC0, 0xFF80
        y = bf16_to_f32(layer.forward(x, ids, weights, pools["two"]))
        assert np.isnan(y[3]).all()
        assert np.isnan(y[11]).any()
        assert np.isfinite(np.delete(y, [3, 11], axis=0)).all()


def test_a_nan_in_one_matrix(kernel_level: str, pools: dict[str, Pool]) -> None:
    """A bias that is NaN: the limit does not make a number of it."""
    for index in range(2):
        layer = with_bias(make("bf16", 128, 128, 2, 1, Activation(limit=7.0)).layer, index, np.nan)
        x, ids, weights = inputs(3, 128, 2, 2)
        y, scratch = np.empty_like(x), layer.scratch(3, 2, pools["one"])
        layer.call(pools["one"], x, ids, weights, y, scratch)()
        assert np.isnan(bf16_to_f32(y)).all()


def with_bias(layer: Layer, matrix: int, value: float, part: int = 0) -> Layer:
    """The layer with a bias of one matrix (0: gate) of all experts of a part."""

    def biased(expert: Any) -> Any:
        parts = list(expert)
        rows = layer.hidden if matrix == 2 else layer.intermediate // layer.parts
        bias = np.full(rows, value, np.float32)
        parts[matrix] = PackedMatrix(parts[matrix].codes, parts[matrix].scale, bias)
        return tuple(parts)

    rows = [[biased(e) if p == part else e for e in row] for p, row in enumerate(layer._keep)]
    c = layer.c.activation
    names = {code: name for name, code in native.GATE_FUNCTIONS.items()}
    activation = Activation(names[c.function], c.alpha, c.beta, c.limit)
    return Layer(layer.layout, activation, layer.hidden, layer.intermediate, rows)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_no_tokens(pools: dict[str, Pool], dtype: Any) -> None:
    layer = make("int8", 128, 128, 2, 1)
    x, ids, weights = np.empty((0, 128), np.uint16), np.empty((0, 2), dtype), np.empty((0, 2), "f4")
    assert layer.forward(x, ids, weights, pools["two"]).shape == (0, 128)
    size = lib.kt_moe_scratch_size(layer.layer.c, 0, 2, pools["two"].c)
    assert size == lib.kt_moe_scratch_size(layer.layer.c, 1, 2, pools["two"].c)
    nothing = ffi.new("kt_moe_call *", {"tokens": 0, "top_k": 2})
    forward = lib.kt_moe_forward
    assert forward(layer.layer.c, pools["two"].c, nothing, ffi.NULL, 0) == lib.KT_OK


def test_several_threads_may_use_a_pool(pools: dict[str, Pool]) -> None:
    """And a layer, each with scratch of its own."""
    layer = make("int8", 384, 512, 5, 2)
    cases = [inputs(tokens, 384, 5, 3) for tokens in (1, 2100, 40, 3)]

    def forward(case: tuple[Array, Array, Array]) -> Array:
        return layer.forward(*case, pools["five"])

    expected = list(map(forward, cases))
    with ThreadPoolExecutor(len(cases)) as callers:
        for _ in range(5):
            found = callers.map(forward, cases)
            assert all(map(np.array_equal, found, expected))


# ---- what is refused


def test_inputs_and_scratch_are_checked(pools: dict[str, Pool]) -> None:
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
    for shape in ((4,), (2, 2, 1), ()):
        odd = np.zeros(shape, np.int64)
        with pytest.raises(ValueError, match="ids must be"):
            layer.call(pools["two"], x, odd, np.zeros(shape, np.float32), y, scratch)
    for array, name in ((y, "y"), (scratch, "scratch")):
        array.flags.writeable = False
        with pytest.raises(ValueError, match=f"{name} cannot be written"):
            layer.call(pools["two"], x, ids, weights, y, scratch)
        array.flags.writeable = True
    with pytest.raises(ValueError, match="cannot be computed"):
        layer.scratch(2, 0, pools["two"])


def test_a_call_outlives_its_pool() -> None:
    layer = make("int8", 128, 128, 2, 1).layer
    x, ids, weights = inputs(2, 128, 2, 2)
    pool = Pool(2)
    y, scratch = np.empty_like(x), layer.scratch(2, 2, pool)
    call = layer.call(pool, x, ids, weights, y, scratch)
    call()
    pool.close()
    for late in (call, lambda: layer.touch(pool), lambda: layer.scratch(2, 2, pool)):
        with pytest.raises(ValueError, match="the pool is closed"):
            late()


@pytest.mark.parametrize("limit", [-1.0, -0.5, float("nan"), float("-inf")])
def test_impossible_limits(pools: dict[str, Pool], limit: float) -> None:
    with pytest.raises(ValueError, match="limit"):
        make("int8", 128, 128, 2, 1, Activation(limit=limit))
    layer = make("int8", 128, 128, 3, 1).layer
    before, layer.c.activation.limit = layer.c.activation.limit, limit
    assert lib.kt_moe_scratch_size(layer.c, 1, 1, pools["one"].c) == 0
    assert lib.kt_moe_touch(layer.c, pools["one"].c) == lib.KT_ERR_ARGUMENT
    layer.c.activation.limit = before


def status_of(layer: Layer, pool: Pool, tokens: int = 2, top_k: int = 2, **changed: Any) -> int:
    """kt_moe_forward's, with arrays of 2 tokens."""
    x, ids, weights = inputs(2, layer.hidden, layer.experts, 2)
    scratch, y = layer.scratch(2, 2, pool), np.empty_like(x)
    call = ffi.new("kt_moe_call *", {"tokens": tokens, "top_k": top_k, "id_size": 8} | changed)
    for name, array in (("x", x), ("ids", ids), ("weights", weights), ("y", y)):
        if name not in changed:
            setattr(call, name, ffi.cast("void *", array.ctypes.data))
    memory = ffi.from_buffer(scratch)
    return int(lib.kt_moe_forward(layer.c, pool.c, call, memory, scratch.nbytes))


def test_numbers_beyond_the_address_space(pools: dict[str, Pool]) -> None:
    layer, pool = make("int8", 128, 128, 2, 1).layer, pools["two"]
    assert status_of(layer, pool) == lib.KT_OK
    for tokens, top_k in (
        (3, 2**62),
        (3, 2**32),
        (3, 2**20),
        (3, 0),
        (2**62, 2),
        (2**62, 4),
        (2**57, 1),
        (2**50, 2**16),
        (-1, 2),
    ):
        assert lib.kt_moe_scratch_size(layer.c, tokens, top_k, pool.c) == 0, (tokens, top_k)
        assert status_of(layer, pool, tokens, top_k) == lib.KT_ERR_ARGUMENT, (tokens, top_k)
    assert lib.kt_moe_scratch_size(layer.c, 2048, 2**20 - 1, pool.c) > 2**31 * 128


def test_a_bias_of_down_belongs_to_part_0(pools: dict[str, Pool]) -> None:
    layer = make("bf16", 128, 256, 2, 2).layer
    assert status_of(with_bias(layer, 2, 1.0, part=0), pools["two"]) == lib.KT_OK
    with pytest.raises(ValueError, match="only part 0"):
        with_bias(layer, 2, 1.0, part=1)
    biased = with_bias(layer, 2, 1.0, part=0)
    for expert in range(2):
        biased._table[2 + expert].down_bias = biased._table[expert].down_bias
    assert status_of(biased, pools["two"]) == lib.KT_ERR_ARGUMENT


@pytest.mark.parametrize("method", ["int8", "fp8", "gint4-32"])
@pytest.mark.parametrize("name", ["gate_scale", "up_scale", "down_scale"])
def test_scales_that_are_not_aligned(pools: dict[str, Pool], method: str, name: str) -> None:
    cached = make(method, 256, 256, 2, 1).layer
    rows: list[list[Any]] = [list(row) for row in cached._keep]
    layer = Layer(cached.layout, Activation(), 256, 256, rows)
    for entry in layer._table:
        setattr(entry, name, getattr(entry, name) + 1)
    assert status_of(layer, pools["two"]) == lib.KT_ERR_ARGUMENT

    def moved(array: Array) -> Array:
        memory = native.aligned_bytes(array.nbytes + 1)
        return memory[1:]

    matrices = list(rows[0][0])
    index = ["gate_scale", "up_scale", "down_scale"].index(name)
    scale = matrices[index].scale
    assert scale is not None
    matrices[index] = PackedMatrix(matrices[index].codes, moved(scale))
    with pytest.raises(ValueError, match=f"{name[:-6]} scales must be aligned"):
        Layer(cached.layout, Activation(), 256, 256, [[(matrices[0], matrices[1], matrices[2])]])


def test_places_of_another_number_of_threads() -> None:
    for places in ([0], [], [0] * 65):
        with pytest.raises(ValueError, match=f"cpus are {len(places)} numbers for 64"):
            Pool(64, cpus=places)
        with pytest.raises(ValueError, match=f"nodes are {len(places)} numbers for 64"):
            Pool(64, nodes=places)


def test_nothing_where_there_is_nothing() -> None:
    lib.kt_cpu_detect(ffi.NULL)
    assert lib.kt_pool_threads(ffi.NULL) == lib.kt_pool_nodes(ffi.NULL) == 0


PACKED: dict[str, tuple[Layout, Any, tuple[int, int], Any, tuple[int, ...]]] = {
    "int8": (Layout("int8"), np.int8, (64, 256), np.float32, (64,)),
    "int4": (Layout("int4"), np.int8, (64, 256), np.float32, (64,)),
    "bf16": (Layout("bf16", 0, "none"), np.uint16, (64, 256), None, ()),
    "fp8": (Layout("fp8", 128), np.uint8, (64, 256), np.float32, (1, 2)),
    "fp8-channel": (Layout("fp8"), np.uint8, (64, 256), np.float32, (64,)),
    "mxfp4": (Layout("mxfp4", 32, "ue8m0"), np.uint8, (64, 128), np.uint8, (64, 8)),
    "nvfp4": (Layout("nvfp4"), np.uint8, (64, 144), np.float32, (64,)),
    "gint4": (Layout("gint4", 64, "bf16"), np.uint8, (64, 128), np.uint16, (64, 4)),
    "gint4-f32": (Layout("gint4", 32), np.uint8, (64, 128), np.float32, (64, 8)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packing_checks_codes_and_scales(name: str) -> None:
    layout, dtype, shape, scale_dtype, scale_shape = PACKED[name]
    codes, packed = np.ones(shape, dtype), np.empty(layout.weight_size(64, 256), np.uint8)
    scale = None if scale_dtype is None else np.ones(scale_shape, scale_dtype)
    native.pack_weight(layout, 64, 256, codes, scale, packed)
    for bad in (codes[:32], codes[:, :64], codes.reshape(-1), codes.astype(np.float64), codes[:0]):
        with pytest.raises(ValueError, match="codes must be"):
            native.pack_weight(layout, 64, 256, bad, scale, packed)
    with pytest.raises(ValueError, match="packed must be"):
        native.pack_weight(layout, 64, 256, codes, scale, packed[1:])
    with pytest.raises(ValueError, match=r"does not allow a matrix of \[64, 250\]"):
        native.pack_weight(layout, 64, 250, codes, scale, packed)
    if scale is None:
        with pytest.raises(ValueError, match="has no scales"):
            native.pack_weight(layout, 64, 256, codes, np.ones(64, np.float32), packed)
        return
    for wrong in (scale[:-1], scale.astype(np.float64), scale.astype(np.int8), scale[..., None]):
        with pytest.raises(ValueError, match="scale must be"):
            native.pack_weight(layout, 64, 256, codes, wrong, packed)
    with pytest.raises(ValueError, match="needs scales"):
        native.pack_weight(layout, 64, 256, codes, None, packed)


@pytest.mark.parametrize(
    ("kernel", "code"), [("int8", -128), ("int4", 8), ("int4", 100), ("int4", -8)]
)
def test_codes_out_of_range_are_not_packed(kernel: str, code: int) -> None:
    layout, codes = Layout(kernel), np.zeros((64, 256), np.int8)
    codes[63, 255] = code
    packed = np.empty(layout.weight_size(64, 256), np.uint8)
    with pytest.raises(ValueError, match=f"{kernel} codes must be"):
        native.pack_weight(layout, 64, 256, codes, np.ones(64, np.float32), packed)


def test_matrices_that_are_too_wide() -> None:
    for shape, what in (
        ((65536, 128), "hidden size 65536"),
        ((128, 131072), "intermediate size of a part 65536"),
    ):
        with pytest.raises(UsageError, match=f"{what}: kernels read at most 32768 columns"):
            check_shape(FORMATS["bf16"], *shape, parts=2)
    check_shape(FORMATS["bf16"], 32768, 65536, parts=2)


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


@pytest.mark.parametrize("parts", [1, 2, 3, 128])
def test_touching_brings_every_page(pools: dict[str, Pool], parts: int) -> None:
    """Those of memory that nobody has seen are there afterwards."""
    page, hidden, width, experts = mmap.PAGESIZE, 128, 32, 7
    size = hidden * width * 2
    for pool in pools.values():
        memory = mmap.mmap(-1, 3 * size * experts * parts, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        codes = np.frombuffer(memory, np.uint8).reshape(parts, experts, 3, size)
        if present(codes, page) is None:
            pytest.skip("/proc/self/pagemap cannot be read")
        rows: list[Any] = [
            [tuple(PackedMatrix(m) for m in e) if i != 3 else None for i, e in enumerate(part)]
            for part in codes
        ]
        layer = Layer(Layout("bf16", 0, "none"), Activation(), hidden, width * parts, rows)
        layer.c.activation.function = lib.KT_RELU2  # has no gate, so that is not to be read
        layer.touch(pool)
        for i in range(experts):
            for matrix, expected in enumerate((0, 1, 1)):
                there = [present(codes[part, i, matrix], page) for part in range(parts)]
                assert there == [0 if i == 3 else expected * size // page] * parts
        layer.c.activation.function = lib.KT_SWIGLU
        layer.touch(pool)
        for i in range(experts):
            there = [present(codes[part, i], page) for part in range(parts)]
            assert there == [0 if i == 3 else 3 * size // page] * parts


def present(array: Array, page: int) -> int | None:
    """How many pages of the array are in memory; None where the system does not tell."""
    try:
        with Path("/proc/self/pagemap").open("rb") as file:
            file.seek(array.ctypes.data // page * 8)
            entries = np.frombuffer(file.read(array.nbytes // page * 8), np.uint64)
    except OSError:
        return None
    return int((entries >> np.uint64(63)).sum())


def test_many_parts(pools: dict[str, Pool]) -> None:
    """bench --shape 32,4096,2,1 --numa 128."""
    layer = make("bf16", 32, 4096, 2, 128)
    x, ids, weights = inputs(5, 32, 2, 1)
    for pool in pools.values():
        layer.layer.touch(pool)
        assert_true(layer, layer.forward(x, ids, weights, pool), x, ids, weights)
