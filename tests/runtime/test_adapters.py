"""LoRA beside the packed weights of a layer: what is computed, chosen and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Activation
from ktconv.runtime import DeferredExperts, MoELayer, Pool, compute
from ktconv.runtime.adapters import LayerAdapter, packed_pair
from ktconv.runtime.layers import pack_experts
from ktconv.runtime.layers.experts import OutputNorm, round_activations
from ktconv.system.arrays import F32

from .conftest import EXPERTS, HIDDEN, INNER, TOP_K, batch

Make = Callable[..., MoELayer]
SHAPES = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))  # of gate, up and down
Pairs = list[tuple[F32, F32, float] | None]  # A, B and scale of gate, up and down
METHODS = ["bf16", "int8", "int4", "gint4-32", "fp8", "mxfp4"]


def values(matrix: Any) -> Any:
    """The numbers of a matrix, if it is there."""
    return None if matrix is None else matrix.values()


def rounded(values: F32) -> F32:
    return bf16_to_f32(f32_to_bf16(values))


def matrices(ranks: Sequence[int], seed: int = 0, size: float = 0.1) -> list[Pairs]:
    """Of each expert, of a rank for each of its three matrices in turn; 0: none."""
    found: list[Pairs] = []
    for expert in range(EXPERTS):
        rng = np.random.default_rng([seed, expert])
        own: Pairs = []
        for index, (outputs, inputs) in enumerate(SHAPES):
            rank = ranks[(expert + index) % len(ranks)]
            a = rounded(rng.standard_normal((rank, inputs), np.float32) * np.float32(size))
            b = rounded(rng.standard_normal((outputs, rank), np.float32) * np.float32(size))
            own.append((a, b, 0.5 + expert / 4) if rank else None)
        found.append(own)
    return found


def adapter_of(experts: list[Pairs]) -> LayerAdapter:
    return LayerAdapter(
        [tuple(one and packed_pair(*one) for one in pairs) for pairs in experts]  # type: ignore[misc]
    )


def product(weights: F32, read: F32, pair: Any, lora_reads: F32) -> F32:
    y = read.astype(np.float64) @ weights.T.astype(np.float64)
    if pair:
        a, b, scale = pair
        y += scale * ((lora_reads.astype(np.float64) @ a.T.astype(np.float64)) @ b.T)
    return y.astype(np.float32)


def expected(
    layer: MoELayer, x: F32, ids: Any, weights: F32, lora: Sequence[list[Pairs] | None]
) -> F32:
    """Of each token with its own LoRA, activations rounded as the kernels round them."""
    packed, y = layer.packed, np.zeros_like(x)
    for token, row in enumerate(rounded(x)):
        read = round_activations(packed.format, row[None])
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up, down = map(values, packed.streams(int(packed.origins[expert])))
            own = lora[token]
            pairs = own[packed.origins[expert]] if own else [None] * 3
            g = product(gate, read, pairs[0], row[None])
            u = product(up, read, pairs[1], row[None])
            with np.errstate(over="ignore"):
                middle = g / (1 + np.exp(-g)) * u
            y[token] += weight * product(down, packed._rounded(middle), pairs[2], middle)[0]
    return y


def relative(found: F32, wanted: F32) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.fixture
def levels() -> Iterator[list[str]]:
    """Those of this machine."""
    before = native.isa()
    yield native.isa_available()
    native.use_isa(before)


@pytest.mark.parametrize("method", METHODS)
def test_products_are_those_of_the_matrices(make_layer: Make, method: str, levels: Any) -> None:
    """On every level; LoRA changes results by far more than the bound."""
    layer, lora = make_layer(method), matrices([16])
    layer.add_adapter("one", adapter_of(lora))
    for tokens in (1, 7, 70):
        x, ids, weights = batch(tokens)
        wanted = expected(layer, x, ids, weights, [lora] * tokens)
        assert relative(layer(x, ids, weights), wanted) > 0.3
        for level in levels:
            native.use_isa(level)
            assert relative(layer(x, ids, weights, adapter="one"), wanted) < 0.006, (level, tokens)


@pytest.mark.parametrize("method", ["int8", "int4", "gint4-32"])
@pytest.mark.parametrize("rank", [1, 3, 16, 33])
def test_bits_are_those_of_every_level(
    make_layer: Make, method: str, rank: int, levels: Any
) -> None:
    layer = make_layer(method, parts=1 if method == "int4" else 2)
    layer.add_adapter("one", adapter_of(matrices([rank])))
    for tokens in (1, 6, 130):
        arguments = batch(tokens)
        found = []
        for level in levels:
            native.use_isa(level)
            found.append(layer(*arguments, adapter="one"))
        assert all(np.array_equal(one, found[0]) for one in found), tokens


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("ranks", [[1], [3], [8], [64], [256], [16, 1, 0, 33], [0, 0, 5]])
def test_any_rank_of_any_matrix(make_layer: Make, ranks: list[int], parts: int) -> None:
    """A of down is cut at the parts, in the middle of its rows."""
    layer = make_layer("bf16", parts=parts)
    lora = matrices(ranks, size=0.3 / max(ranks) ** 0.5)
    layer.add_adapter("one", adapter_of(lora))
    x, ids, weights = batch(9)
    wanted = expected(layer, x, ids, weights, [lora] * 9)
    assert relative(layer(x, ids, weights, adapter="one"), wanted) < 0.006


def test_tokens_have_the_bits_of_their_adapter_alone(make_layer: Make) -> None:
    """Whatever the others have, with one thread or two, and many or few tokens."""
    layer = make_layer("int8", parts=2)
    for name, rank in (("a", 16), ("b", 3), ("c", 40)):
        layer.add_adapter(name, adapter_of(matrices([rank], seed=rank)))
    x, ids, weights = batch(300)
    chosen = np.random.default_rng(5).integers(-1, 3, 300).astype(np.int32)
    found = layer(x, ids, weights, adapter_ids=chosen)
    alone = [layer(x, ids, weights, adapter=name) for name in (*layer.adapters, None)]
    for token, number in enumerate(chosen):
        assert np.array_equal(found[token], alone[number][token]), token
        one = slice(token, token + 1)
        own = None if number < 0 else layer.adapters[number]
        if token % 50 == 0:
            again = layer(x[one], ids[one], weights[one], adapter=own)
            assert np.array_equal(again[0], found[token])
    assert np.array_equal(alone[-1], layer(x, ids, weights))
    with Pool(1) as pool:
        other = MoELayer(layer.packed, pool)
        for name in layer.adapters:
            other.add_adapter(name, layer.adapter(name))
        assert np.array_equal(other(x, ids, weights, adapter_ids=chosen), found)


def test_more_tokens_than_a_batch_of_the_kernels(make_layer: Make) -> None:
    layer = make_layer("int8")
    layer.add_adapter("a", adapter_of(matrices([4])))
    x, ids, weights = batch(2100)
    chosen = np.where(np.arange(2100) % 3 == 0, 0, -1).astype(np.int64)
    found = layer(x, ids, weights, adapter_ids=chosen)
    late = slice(2050, 2100)
    again = layer(x[late], ids[late], weights[late], adapter_ids=chosen[late])
    assert np.array_equal(found[late], again)
    changed = (found != layer(x, ids, weights)).any(axis=1)
    assert np.array_equal(changed, chosen == 0)


def test_an_expert_twice_in_a_token_counts_twice(make_layer: Make) -> None:
    layer, lora = make_layer("bf16"), matrices([8])
    layer.add_adapter("a", adapter_of(lora))
    x, _, weights = batch(4)
    ids = np.array([[0, 0, 0], [1, 2, 1], [3, 3, 1], [5, 4, 5]])
    wanted = expected(layer, x, ids, weights, [lora] * 4)
    assert relative(layer(x, ids, weights, adapter="a"), wanted) < 0.006


def test_slots_have_the_adapter_of_their_expert(pool: Pool) -> None:
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, EXPERTS, INNER, HIDDEN), np.float32) * np.float32(0.1)
    down = rng.standard_normal((EXPERTS, HIDDEN, INNER), np.float32) * np.float32(0.1)
    slots, lora = [5, 0, 3, 3], adapter_of(matrices([16]))
    whole = MoELayer.pack(gate, up, down, "int8", pool=pool)
    some = MoELayer.pack(gate, up, down, "int8", slots=slots, pool=pool)
    for layer in (whole, some):
        layer.add_adapter("a", lora)
    x, _, weights = batch(8)
    ids = np.random.default_rng(2).integers(0, 4, (8, TOP_K))
    wanted = whole(x, np.array(slots)[ids], weights, adapter="a")
    # Experts are summed in the order of their slots.
    assert np.allclose(some(x, ids, weights, adapter="a"), wanted, atol=1e-4)


def test_experts_without_a_gate(pool: Pool) -> None:
    def made(index: int) -> Any:
        rng = np.random.default_rng([3, index])
        up, down = (rng.standard_normal(shape, np.float32) * 0.1 for shape in SHAPES[1:])
        return None, up.astype(np.float32), down.astype(np.float32)

    packed = pack_experts(
        FORMATS["bf16"], made, list(range(EXPERTS)), HIDDEN, INNER, activation=Activation("relu2")
    )
    layer, lora = MoELayer(packed, pool), matrices([16])
    without = [[None, *pairs[1:]] for pairs in lora]
    layer.add_adapter("a", adapter_of(without))
    x, ids, weights = batch(3)
    y = np.zeros_like(x)
    for token, row in enumerate(rounded(x)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            up, down = (one.values() for one in packed.streams(int(expert))[1:])
            middle = np.maximum(product(up, row[None], lora[expert][1], row[None]), 0) ** 2
            y[token] += weight * product(down, rounded(middle), lora[expert][2], middle)[0]
    assert relative(layer(x, ids, weights, adapter="a"), y) < 0.006
    layer.add_adapter("gate", adapter_of(lora))
    with pytest.raises(UsageError):
        layer(x, ids, weights, adapter="gate")


def test_outputs_that_are_normalised(make_layer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's output with LoRA, one adapter for all tokens or one for each, in blocks."""
    monkeypatch.setattr(compute, "_ROWS", 5 * TOP_K)
    layer, norm = (
        make_layer("bf16"),
        OutputNorm(np.linspace(-0.5, 0.5, HIDDEN, dtype=np.float32), 1e-5),
    )
    for seed in (0, 1):
        layer.add_adapter(f"{seed}", adapter_of(matrices([4, 0, 20], seed)))
    x, ids, weights = batch(13)
    ids[3, 0] = -1
    each = np.arange(13) % 3 - 1

    def expected_of(**chosen: Any) -> F32:
        total = np.zeros_like(x)
        for slot in range(TOP_K):
            one = np.ascontiguousarray(ids[:, slot : slot + 1])
            alone = layer(x, one, np.ones_like(weights[:, :1]), **chosen)
            chosen_weights = np.where(one < 0, np.float32(0), weights[:, slot : slot + 1])
            total += norm.of(rounded(alone)) * chosen_weights
        return total

    given: list[dict[str, Any]] = [{"adapter": "1"}, {"adapter_ids": each}, {}]
    wanted = [expected_of(**one) for one in given]
    layer.packed.norm = norm
    found = [layer(x, ids, weights, **one) for one in given]
    for own, right in zip(found, wanted, strict=True):
        assert np.abs(own - right).max() < 0.01 * np.abs(right).max()
    assert np.abs(found[0] - found[2]).max() > 0.1 * np.abs(found[2]).max()
    assert np.array_equal(found[1][each == -1], found[2][each == -1])
    assert np.array_equal(found[1][each == 1], found[0][each == 1])


def test_skipped_experts_and_sums(make_layer: Make) -> None:
    layer = make_layer("int8")
    layer.add_adapter("a", adapter_of(matrices([16])))
    x, ids, weights = batch(6)
    mask = np.arange(EXPERTS) % 2 == 0
    rest = layer(x, ids, weights, skip=mask, adapter="a")
    whole = layer(x, ids, weights, skip=~mask, add_to=rest, adapter="a")
    assert np.allclose(whole, layer(x, ids, weights, adapter="a"), atol=1e-4)


@pytest.mark.parametrize("method", ["int8", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_token(
    make_layer: Make, method: str, value: float, levels: Any
) -> None:
    layer = make_layer(method)
    layer.add_adapter("a", adapter_of(matrices([16])))
    x, ids, weights = batch(40)
    for level in levels:
        native.use_isa(level)
        good = layer(x, ids, weights, adapter="a")
        bad = x.copy()
        bad[7, 100] = value
        found = layer(bad, ids, weights, adapter="a")
        assert np.isnan(found[7]).all(), level
        assert np.array_equal(np.delete(found, 7, axis=0), np.delete(good, 7, axis=0)), level


def test_calls_of_every_kind(make_layer: Make) -> None:
    layer = make_layer("int8")
    for name in ("a", "b"):
        layer.add_adapter(name, adapter_of(matrices([8], seed=ord(name))))
    x, ids, weights = batch(4)
    chosen = np.array([0, -1, 1, 0], np.int32)
    wanted = layer(x, ids, weights, adapter_ids=chosen)
    assert np.array_equal(layer.submit(x, ids, weights, adapter_ids=chosen).wait(), wanted)
    for dtype in (np.int8, np.int16, np.int64):
        assert np.array_equal(layer(x, ids, weights, adapter_ids=chosen.astype(dtype)), wanted)
    shaped = [one.reshape(2, 2, *one.shape[1:]) for one in (x, ids, weights, chosen)]
    again = layer(*shaped[:3], adapter_ids=shaped[3])
    assert np.array_equal(again.reshape(4, -1), wanted)
    step = layer.prepare(x, ids, weights, adapter_ids=chosen)
    assert np.array_equal(step(), wanted)
    chosen[1] = 1
    assert np.array_equal(step(), layer(x, ids, weights, adapter_ids=chosen))
    with DeferredExperts(keep=TOP_K - 1) as deferred:
        first = deferred(layer, x, ids, weights, adapter="a")
        rest = deferred(layer, x, ids, weights, adapter="b", last=True)
    both = layer(x, ids, weights, adapter="a") + layer(x, ids, weights, adapter="b")
    assert np.allclose(first + rest, both, atol=1e-4)
    assert layer(x[:0], ids[:0], weights[:0], adapter_ids=chosen[:0]).shape == (0, HIDDEN)


def test_adapters_come_and_go(make_layer: Make) -> None:
    layer = make_layer("int8")
    first, second = adapter_of(matrices([8])), adapter_of(matrices([24], seed=1))
    assert not layer.adapters and layer.adapter_bytes == 0
    before = layer.plan_bytes(64)
    layer.add_adapter("one", first)
    layer.add_adapter("two", second)
    assert layer.adapters == ("one", "two")
    assert layer.adapter_bytes == first.nbytes + second.nbytes and second.rank == 24
    assert layer.plan_bytes(64) > before
    x, ids, weights = batch(3)
    two = layer(x, ids, weights, adapter="two")
    numbers = np.ones(3, np.int32)
    assert np.array_equal(layer(x, ids, weights, adapter_ids=numbers), two)
    layer.remove_adapter("one")
    assert np.array_equal(layer(x, ids, weights, adapter_ids=0 * numbers), two)
    with pytest.raises(UsageError, match="has no adapter 'one'"):
        layer.remove_adapter("one")
    with pytest.raises(UsageError, match="'two' already"):
        layer.add_adapter("two", first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": "three"}, "the layer has no adapter 'three'"),
        ({"adapter": "one", "adapter_ids": np.zeros(5, np.int32)}, "not both"),
        ({"adapter_ids": np.full(5, 2, np.int32)}, "contains 2, which is no adapter"),
        ({"adapter_ids": np.full(5, -2, np.int64)}, "contains -2, which is no adapter"),
        ({"adapter_ids": np.full(5, 2**32, np.int64)}, "contains 4294967296"),
        ({"adapter_ids": np.zeros(4, np.int32)}, "adapter_ids must be"),
        ({"adapter_ids": np.zeros((5, 3), np.int32)}, "adapter_ids must be"),
        ({"adapter_ids": np.zeros(5, np.float32)}, "adapter_ids must be"),
        ({"adapter_ids": [0] * 5}, "adapter_ids is neither"),
    ],
)
def test_adapters_that_are_refused(make_layer: Make, options: Any, message: str) -> None:
    layer, out = make_layer("int8"), np.full((5, HIDDEN), 7, np.float32)
    for name in ("one", "two"):
        layer.add_adapter(name, adapter_of(matrices([8])))
    x, ids, weights = batch(5)
    with pytest.raises(UsageError, match=message):
        layer(x, ids, weights, out=out, **options)
    assert (out == 7).all()


def test_a_number_that_became_wrong_is_refused_by_the_kernels(make_layer: Make) -> None:
    layer, out = make_layer("int8"), np.full((5, HIDDEN), 7, np.float32)
    layer.add_adapter("one", adapter_of(matrices([8])))
    x, ids, weights = batch(5)
    chosen = np.zeros(5, np.int32)
    step = layer.prepare(x, ids, weights, out=out, adapter_ids=chosen)
    for wrong in (1, -2, 2**31 - 1):
        chosen[3] = wrong
        with pytest.raises(UsageError):
            step()
        assert (out == 7).all()
