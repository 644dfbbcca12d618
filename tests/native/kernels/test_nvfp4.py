"""NVFP4: E4M3 scales among the codes, a scale per row."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import amx
from helpers.looped import each
from helpers.reference import packing
from native.kernels.product import (
    AMX_LEAST,
    F32,
    STATUS_NONFINITE,
    U8,
    Layout,
    Products,
    Refused,
    activations,
    assert_batch_independent,
    assert_near,
    bf16_rounded,
    least_tokens,
    tile_tokens,
    tiles_of_strips,
)

from ktconv.formats import FORMATS, groups, nvfp4

pytestmark = pytest.mark.slow

LAYOUT = Layout.of("nvfp4", 0, "f32")
ROW = FORMATS["nvfp4"]
SHAPES = [(32, 32), (64, 96), (160, 384), (96, 1152), (32, 2080), (32, 7168), (64, 7296)]
TINY = 2.0**-126


def e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> U8:
    """Every code but the NaNs: zeros, denormals and negative ones too."""
    drawn = rng.integers(0, 254, shape, np.uint8)
    return drawn + (drawn >= 127)


class Case:
    """A packed matrix; `values` are the numbers that it stands for."""

    def __init__(self, products: Products, rows: int, cols: int, seed: int) -> None:
        rng = np.random.default_rng([seed, rows, cols])
        nibbles = groups.nibbles(rng.integers(0, 16, (rows, cols), np.uint8))
        self.codes = nvfp4.plain(nibbles, e4m3(rng, (rows, cols // 16)))
        self.scale = (rng.uniform(0.5, 2, rows) * 2.0 ** rng.integers(-12, 3, rows)).astype("f4")
        self.products = products
        self.packed = products.pack(LAYOUT, rows, cols, self.codes, self.scale)
        exact = nvfp4.dequantize(ROW, self.codes, np.ones_like(self.scale)).astype(np.float64)
        self.values = exact * self.scale[:, None]

    def rows_of(self, x: F32) -> U8:
        return self.products.rows(LAYOUT, x)

    def check(self, found: F32, x: F32) -> None:
        """docs/formats.md 8.6."""
        wide, cols = bf16_rounded(x), x.shape[1]
        flushed = 2 * cols * TINY * float(self.scale.max()) * 448
        bound = (16 + cols // 16 + 3) * 2.0**-24 * (np.abs(wide) @ np.abs(self.values).T) + flushed
        assert_near(found, wide @ self.values.T, bound)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_nvfp4_packing_is_the_reference(products: Products, rows: int, cols: int) -> None:
    case = Case(products, rows, cols, 1)
    assert case.packed.codes.nbytes == rows * cols * 9 // 16
    assert np.array_equal(case.packed.codes, packing.nvfp4(case.codes))
    assert case.packed.scale is not None
    assert np.array_equal(case.packed.scale, case.scale.view(np.uint8))


def test_where_codes_and_scales_lie(products: Products) -> None:
    """docs/formats.md 8.6."""
    codes, inner = np.zeros((64, 96), np.uint8), np.zeros((64, 6), np.uint8)
    codes[37, 70], inner[37, 5] = 15, 0x38
    plain = nvfp4.plain(groups.nibbles(codes), inner)
    packed = products.pack(LAYOUT, 64, 96, plain, np.ones(64, np.float32)).codes
    assert np.flatnonzero(packed).tolist() == [2965, 3429]
    assert (packed[2965], packed[3429]) == (15, 0x38)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_nvfp4_products_are_near_exact_ones(
    products: Products, level: str, rows: int, cols: int
) -> None:
    products.use(LAYOUT, level)
    case = Case(products, rows, cols, 2)
    x = activations(13, cols, 3)
    case.check(products.everything(case.packed, case.rows_of(x)), x)


@each("tokens", [*range(1, 34), 96])
def test_nvfp4_every_number_of_tokens(products: Products, level: str, tokens: int) -> None:
    products.use(LAYOUT, level)
    case = Case(products, 64, 224, tokens)
    x = activations(tokens, 224, tokens)
    case.check(products.everything(case.packed, case.rows_of(x)), x)


@pytest.mark.parametrize(("rows", "cols"), [(64, 32), (160, 672), (64, 2176), (32, 7296)])
def test_nvfp4_batch_independence(products: Products, level: str, rows: int, cols: int) -> None:
    products.use(LAYOUT, level)
    case = Case(products, rows, cols, 4)
    x = case.rows_of(activations(96, cols, 5))
    assert_batch_independent(products, case.packed, x, least_tokens(level, "nvfp4"))


@pytest.mark.parametrize("tokens", tile_tokens(AMX_LEAST["nvfp4"]))
def test_nvfp4_amx_loads_a_tile_per_product(
    products: Products, emulator: amx.Emulator, tokens: int
) -> None:
    emulator.install()
    products.use(LAYOUT, "amx")
    case = Case(products, 64, 544, 6)
    x = case.rows_of(activations(tokens, 544, 7))
    emulator.reset()
    products.product(case.packed, x, 0, 2)
    counts = emulator.counts()
    assert (counts.loads, counts.bf16_products) == tiles_of_strips(tokens, 2, 544)
    assert counts.configs == 1


@pytest.mark.parametrize("before", [1, 36, 63])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_nvfp4_unaligned_codes(products: Products, level: str, tokens: int, before: int) -> None:
    products.use(LAYOUT, level)
    case = Case(products, 96, 1152, 6)
    x = case.rows_of(activations(tokens, 1152, 7))
    moved = products.everything(case.packed.moved(before), x)
    assert np.array_equal(moved, products.everything(case.packed, x))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("at", [(0, 16), (31, 71)])
def test_nvfp4_scales_must_be_numbers(products: Products, code: int, at: tuple[int, int]) -> None:
    """Of codes that are equal to them, none is taken for one."""
    codes = np.zeros((32, 72), np.uint8)
    codes[:, :16] = codes[:, 54:70] = code
    products.pack(LAYOUT, 32, 128, codes, np.ones(32, np.float32))
    codes[at] = code
    with pytest.raises(Refused) as caught:
        products.pack(LAYOUT, 32, 128, codes, np.ones(32, np.float32))
    assert caught.value.status == STATUS_NONFINITE


def test_nvfp4_shapes_that_do_not_fit(products: Products) -> None:
    for rows, cols in ((16, 128), (32, 16), (33, 128), (32, 48), (0, 128)):
        assert products.sizes(LAYOUT, rows, cols) == (0, 0)
    for other in (("nvfp4", 16, "f32"), ("nvfp4", 0, "bf16"), ("nvfp4", 0, "none")):
        assert products.sizes(Layout.of(*other), 32, 128) == (0, 0)


def test_the_quantizer_is_near(products: Products) -> None:
    """A group's largest error: half of the widest step (2) of 6, and the E4M3 rounding of 1/16."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((64, 256)).astype(np.float32)
    codes, scale = nvfp4.quantize(ROW, values)
    error = np.abs(nvfp4.dequantize(ROW, codes, scale) - values).reshape(64, -1, 16)
    assert (error.max(2) <= np.abs(values).reshape(64, -1, 16).max(2) * 0.24).all()
    assert np.linalg.norm(error) / np.linalg.norm(values) < 0.11
