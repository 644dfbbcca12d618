"""BF16 products: exact packing, bounds against binary64, bits that ignore the batch."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import amx
from helpers.looped import each
from helpers.reference import packing
from native.kernels.product import (
    AMX_LEAST,
    F64,
    Layout,
    Products,
    activations,
    assert_batch_independent,
    assert_near,
    bf16_rounded,
    least_tokens,
    loads_per_product,
    sums_loaded_again,
    tile_tokens,
)
from numpy.typing import NDArray

from ktconv.formats.decode import bf16_to_f32, f32_to_bf16

pytestmark = pytest.mark.slow

LAYOUT = Layout.of("bf16")
SHAPES = [(32, 32), (64, 96), (128, 544), (160, 1024), (96, 2080), (32, 7168), (64, 7200)]
TINY = 2.0**-126


def weights(rows: int, cols: int, seed: int) -> NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    return f32_to_bf16((rng.standard_normal((rows, cols)) / 16).astype(np.float32))


def bound_of(w: F64, x: F64) -> F64:
    """How far a product may lie from the exact one, [tokens, rows] (docs/formats.md 8.1)."""
    n = w.shape[1]
    flushed = TINY * (np.abs(x).sum(axis=1)[:, None] + np.abs(w).sum(axis=1)[None, :])
    return (n + 1) * 2.0**-24 * (np.abs(x) @ np.abs(w).T) + flushed + 2 * n * TINY


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_bf16_packing_is_the_reference(products: Products, rows: int, cols: int) -> None:
    codes = weights(rows, cols, 1)
    packed = products.pack(LAYOUT, rows, cols, codes)
    assert np.array_equal(np.array(packed.codes).view(np.uint16), packing.bf16(codes))
    assert packed.scale is None


def test_where_a_bf16_element_lies(products: Products) -> None:
    """docs/formats.md 8.1."""
    codes = np.zeros((64, 96), np.uint16)
    codes[37, 70] = 0x3F80
    packed = products.pack(LAYOUT, 64, 96, codes)
    assert np.flatnonzero(packed.codes).tolist() == [10452, 10453]


@pytest.mark.parametrize(("rows", "cols"), [(0, 32), (16, 32), (32, 0), (32, 16), (33, 32)])
def test_bf16_shapes_that_do_not_fit(products: Products, rows: int, cols: int) -> None:
    assert products.sizes(LAYOUT, rows, cols) == (0, 0)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_bf16_products_are_near_exact_ones(
    products: Products, level: str, rows: int, cols: int
) -> None:
    products.use(LAYOUT, level)
    codes = weights(rows, cols, 2)
    w = products.pack(LAYOUT, rows, cols, codes)
    x = activations(13, cols, 3)
    exact = bf16_rounded(x) @ bf16_to_f32(codes).astype(np.float64).T
    bound = bound_of(bf16_to_f32(codes).astype(np.float64), bf16_rounded(x))
    assert_near(products.everything(w, products.rows(LAYOUT, x)), exact, bound)


@pytest.mark.parametrize("cols", [64, 1056])
@each("tokens", [*range(1, 34), 49, 63, 64, 81, 95, 96])
def test_bf16_every_number_of_tokens(
    products: Products, level: str, tokens: int, cols: int
) -> None:
    products.use(LAYOUT, level)
    codes = weights(64, cols, tokens)
    w = products.pack(LAYOUT, 64, cols, codes)
    x = activations(tokens, cols, tokens)
    wide = bf16_to_f32(codes).astype(np.float64)
    found = products.everything(w, products.rows(LAYOUT, x))
    assert_near(found, bf16_rounded(x) @ wide.T, bound_of(wide, bf16_rounded(x)))


@pytest.mark.parametrize(("rows", "cols"), [(160, 544), (64, 2080), (32, 7200)])
def test_bf16_batch_independence(products: Products, level: str, rows: int, cols: int) -> None:
    products.use(LAYOUT, level)
    w = products.pack(LAYOUT, rows, cols, weights(rows, cols, 4))
    x = products.rows(LAYOUT, activations(96, cols, 5))
    assert_batch_independent(products, w, x, least_tokens(level, "bf16"))


@pytest.mark.parametrize("before", [1, 36, 63])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_bf16_unaligned_codes(products: Products, level: str, tokens: int, before: int) -> None:
    products.use(LAYOUT, level)
    w = products.pack(LAYOUT, 96, 1056, weights(96, 1056, 6))
    x = products.rows(LAYOUT, activations(tokens, 1056, 7))
    found = products.everything(w.moved(before), x)
    assert np.array_equal(found, products.everything(w, x))


@pytest.mark.parametrize("tokens", [1, 12, 25])
def test_nonfinite_numbers_stay_in_their_row(products: Products, level: str, tokens: int) -> None:
    products.use(LAYOUT, level)
    codes = weights(64, 96, 8)
    codes[5, 40], codes[33, 95] = 0x7F80, 0x7FC0
    x = activations(tokens, 96, 9)
    x[0, 3] = np.nan
    x[:, 40] = 1
    w = products.pack(LAYOUT, 64, 96, codes)
    found = products.everything(w, products.rows(LAYOUT, x))
    assert np.isnan(found[0]).all()
    assert np.isnan(found[:, 33]).all()
    assert (found[1:, 5] == np.inf).all()
    others = np.delete(found[1:], [5, 33], axis=1)
    assert np.isfinite(others).all()


@pytest.mark.parametrize("tokens", [1, 13])
def test_extreme_numbers(products: Products, level: str, tokens: int) -> None:
    """Exponents from denormals up to where sums stay finite."""
    products.use(LAYOUT, level)
    rng = np.random.default_rng(10)
    codes = rng.integers(0, 0x4380, (32, 256), np.uint16)
    codes |= rng.integers(0, 2, codes.shape, np.uint16) << np.uint16(15)
    x = np.ldexp(activations(tokens, 256, 11), rng.integers(-140, 8, (tokens, 256))).astype(
        np.float32
    )
    w = products.pack(LAYOUT, 32, 256, codes)
    wide = bf16_to_f32(codes).astype(np.float64)
    exact = bf16_rounded(x) @ wide.T
    found = products.everything(w, products.rows(LAYOUT, x))
    assert_near(found, exact, bound_of(wide, bf16_rounded(x)))


@pytest.mark.parametrize("tokens", tile_tokens(AMX_LEAST["bf16"]))
def test_bf16_amx_loads_a_tile_per_product(
    products: Products, emulator: amx.Emulator, tokens: int
) -> None:
    """And configures once in a call."""
    emulator.install()
    products.use(LAYOUT, "amx")
    w = products.pack(LAYOUT, 64, 544, weights(64, 544, 14))
    x = products.rows(LAYOUT, activations(tokens, 544, 15))
    emulator.reset()
    products.product(w, x, 0, 2)
    counts, (loads, needed) = emulator.counts(), loads_per_product(tokens)
    steps = 2 * 544 // 32  # strips, columns
    again = sums_loaded_again(tokens, 2, 2)  # 17 steps of a strip are two chunks
    assert (counts.loads, counts.bf16_products) == (steps * loads + again, steps * needed)
    assert counts.loads - again <= counts.products or tokens % 32 in range(1, 17)
    assert counts.configs == 1


@pytest.mark.parametrize("rows", [2**63 - 32, 2**62, 2**58])
@pytest.mark.parametrize("cols", [128, 32768])
def test_sizes_beyond_the_address_space(products: Products, rows: int, cols: int) -> None:
    for layout in (
        LAYOUT,
        Layout.of("int8", 0, "f32"),
        Layout.of("int4", 0, "f32"),
        Layout.of("fp8", 128, "f32"),
        Layout.of("mxfp4", 32, "ue8m0"),
        Layout.of("gint4", 32, "f32"),
    ):
        assert products.sizes(layout, rows, cols) == (0, 0), layout.format
    assert products.sizes(LAYOUT, 2**40, cols) == (2**41 * cols, 0)


def test_the_widest_bf16_matrix(products: Products, level: str) -> None:
    products.use(LAYOUT, level)
    codes = weights(32, 32768, 12)
    w = products.pack(LAYOUT, 32, 32768, codes)
    x = activations(14, 32768, 13)
    wide = bf16_to_f32(codes).astype(np.float64)
    found = products.everything(w, products.rows(LAYOUT, x))
    assert_near(found, bf16_rounded(x) @ wide.T, bound_of(wide, bf16_rounded(x)))
    assert products.sizes(LAYOUT, 32, 32768 + 32) == (0, 0)
