"""What models compute outside their experts, on every level: against float64. That levels give the
same bits, within their memory, is in native/test/random_dense.h."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.levels import at_level

from ktconv import native
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.system.arrays import F32, U16
from ktconv.system.pool import Pool

HALF = 2**-8  # of a number: the most that rounding to bf16 changes, and a little of sums


def drawn(rng: np.random.Generator, *shape: int) -> tuple[U16, F32]:
    """Random numbers of bf16, and their bits."""
    bits = f32_to_bf16(rng.standard_normal(shape, np.float32))
    return bits, bf16_to_f32(bits).astype(np.float64)


def near(found: U16, expected: F32, sums: F32 | float = 0.0) -> bool:
    """Within rounding: half a step of bf16, and of the sums of binary32 what they are made of."""
    apart = np.abs(bf16_to_f32(found) - expected)
    return bool((apart <= HALF * np.abs(expected) + 2**-18 * sums).all())


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 1), (32, 64, 2), (100, 95, 5), (65, 300, 19)])
def test_linear_layers(isa: str, shape: tuple[int, int, int]) -> None:
    rows, cols, tokens = shape
    rng = np.random.default_rng(shape)
    (weight, w), (bias, b), (x, v) = (
        drawn(rng, rows, cols),
        drawn(rng, rows),
        drawn(rng, tokens, cols),
    )
    y = np.empty((tokens, rows), np.uint16)
    with Pool(2) as pool:
        for biased in (False, True):
            one = native.Linear(
                rows, cols, native.address_of(weight), native.address_of(bias) if biased else 0
            )
            one.run(pool, tokens, native.address_of(x), native.address_of(y))
            expected = v @ w.T + (b if biased else 0)
            assert near(y, expected, np.abs(v) @ np.abs(w).T), biased


@pytest.mark.parametrize("kind", native.NORM_KINDS)
@pytest.mark.parametrize("cols", [1, 40, 128])
def test_norms(isa: str, kind: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    (weight, w), (x, v) = drawn(rng, cols), drawn(rng, 5, cols)
    y = np.empty_like(x)
    native.Norm(cols, native.address_of(weight), 1e-3, kind).run(
        5, native.address_of(x), native.address_of(y)
    )
    normed = v / np.sqrt((v**2).mean(axis=1, keepdims=True) + 1e-3)
    if kind == "rounded":
        normed = bf16_to_f32(f32_to_bf16(normed.astype(np.float32)))
    expected = normed * (w + 1 if kind == "plus one" else w)
    apart = np.abs(bf16_to_f32(y) - expected)
    # Where the first rounding goes the other way, by a last bit of binary32, y is a step away.
    assert (apart <= 3 * HALF * np.abs(expected)).all()
    assert (apart <= HALF * np.abs(expected)).mean() > 0.97


def test_rotation(isa: str) -> None:
    rng = np.random.default_rng(3)
    (x, v), (cosine, c), (sine, s) = drawn(rng, 3, 48), drawn(rng, 48), drawn(rng, 48)
    y = np.empty_like(x)
    native.rotate(3, 48, *map(native.address_of, (x, cosine, sine, y)))
    turned = np.concatenate([-v[:, 24:], v[:, :24]], axis=1)
    first, second = (
        bf16_to_f32(f32_to_bf16(one.astype(np.float32))) for one in (v * c, turned * s)
    )
    assert (y == f32_to_bf16(first + second)).all()


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (18, 2)])
def test_attention(isa: str, tokens: int, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng((tokens, *heads))
    cols, value_cols, each = 40, 24, heads[0] // heads[1]
    (q, a), (k, b), (v, c) = (
        drawn(rng, heads[0], cols),
        drawn(rng, heads[1], tokens, cols),
        drawn(rng, heads[1], tokens, value_cols),
    )
    y = np.empty((heads[0], value_cols), np.uint16)
    one = native.Attention(*heads, cols, value_cols, 0.3)
    scratch = native.aligned_bytes(one.scratch_size(tokens))
    places = (
        (native.address_of(k), tokens * cols, cols),
        (native.address_of(v), tokens * value_cols, value_cols),
    )
    with Pool(3) as pool:
        one.run(pool, native.address_of(q), *places, native.address_of(y), scratch)
        scores = 0.3 * np.einsum("hc,htc->ht", a, b.repeat(each, axis=0))
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        values = c.repeat(each, axis=0)
        expected = np.einsum("ht,htc->hc", shares, values)
        assert near(y, expected, np.einsum("ht,htc->hc", shares, np.abs(values)) * 8)
        with pytest.raises(native.ScratchError):
            one.run(pool, native.address_of(q), *places, native.address_of(y), scratch[:-1])


def test_levels_agree_on_what_is_no_number(isa: str) -> None:
    """NaN, infinities, denormals and the largest numbers: the same as the reference, where a NaN is
    any NaN."""
    rng = np.random.default_rng(8)
    odd = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 1, 0x8001, 0x7F7F, 0xFF7F, 0x8000], np.uint16)

    def with_odd(*shape: int) -> U16:
        bits, _ = drawn(rng, *shape)
        return np.where(rng.random(shape) < 0.01, rng.choice(odd, shape), bits)

    weight, x, keys = with_odd(70, 96), with_odd(3, 96), with_odd(300, 96)
    bias, turn = with_odd(70), with_odd(96)
    at = native.address_of
    linear = native.Linear(70, 96, at(weight), at(bias))
    attention = native.Attention(3, 1, 96, 96, 0.3)
    places = (at(keys), 0, 96), (at(keys), 0, 96)

    def answers() -> list[U16]:
        found = [np.empty((3, 70), np.uint16), *(np.empty_like(x) for _ in range(5))]
        linear.run(pool, 3, at(x), at(found[0]))
        for kind, y in zip(native.NORM_KINDS, found[1:4], strict=True):
            native.Norm(96, at(turn), 1e-6, kind).run(3, at(x), at(y))
        native.rotate(3, 96, at(x), at(turn), at(turn), at(found[4]))
        scratch = native.aligned_bytes(attention.scratch_size(300))
        attention.run(pool, at(x), *places, at(found[5]), scratch)
        return found

    with Pool(2) as pool:
        found = answers()
        native.use_isa("scalar")
        expected = answers()
    for one, other in zip(found, expected, strict=True):
        nan = np.isnan(bf16_to_f32(other))
        assert nan.any() and (np.isnan(bf16_to_f32(one)) == nan).all()
        assert (one[~nan] == other[~nan]).all()


def test_what_is_refused() -> None:
    x, y = np.zeros(64, np.uint16), np.zeros(64, np.uint16)
    at, to = native.address_of(x), native.address_of(y)
    with Pool(1) as pool:
        for linear in (
            native.Linear(0, 8, at),
            native.Linear(8, 8, 0),
            native.Linear(8, 8, at + 1),
        ):
            with pytest.raises(ValueError):
                linear.run(pool, 1, at, to)
        assert native.Attention(3, 2, 8, 8, 1.0).scratch_size(1) == 0
        assert native.Attention(2, 2, 2000, 8, 1.0).scratch_size(1) == 0
        # 2^23 units of 2^31 heads of 1026 numbers would be 2^64 numbers, and a little.
        assert native.Attention(2**31 - 1, 1, 8, 1024, 1.0).scratch_size(2**31 - 1) == 0
    with pytest.raises(ValueError):
        native.Norm(8, at, -1.0, "once").run(1, at, to)
    with pytest.raises(ValueError):
        native.rotate(1, 7, at, at, at, to)


def test_the_reference_is_no_code_of_a_level() -> None:
    with at_level("scalar"):
        assert not native.dense_is_fast()
