"""FP8 products: exact packing, every code, bounds against binary64, bits that ignore the batch."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import amx
from helpers.looped import each
from helpers.reference import packing
from native.kernels.product import (
    AMX_LEAST,
    F32,
    F64,
    STATUS_NONFINITE,
    U8,
    Layout,
    Products,
    Refused,
    Weight,
    activations,
    assert_batch_independent,
    assert_near,
    bf16_rounded,
    least_tokens,
    tile_tokens,
    tiles_of_strips,
)

from ktconv.formats import fp8
from ktconv.formats.decode import E4M3FN_VALUES

pytestmark = pytest.mark.slow

GROUPS = {"block": 128, "row": 0}
SHAPES = {
    "block": [(32, 128), (160, 384), (96, 1152), (288, 256), (32, 7168), (64, 7296)],
    "row": [(32, 64), (160, 320), (96, 1088), (32, 7168), (64, 7232)],
}
CASES = [(scales, *shape) for scales, shapes in SHAPES.items() for shape in shapes]
TINY = 2.0**-126


def layout_of(scales: str) -> Layout:
    return Layout.of("fp8", GROUPS[scales], "f32")


def codes_of(rows: int, cols: int, seed: int) -> U8:
    """All 254 finite codes, equally often."""
    rng = np.random.default_rng(seed)
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    return finite[rng.permutation(rows * cols) % 254].reshape(rows, cols)


def scale_of(scales: str, rows: int, cols: int, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    shape = (-(-rows // 128), cols // 128) if scales == "block" else (rows,)
    return (rng.uniform(0.5, 2, shape) * 2.0 ** rng.integers(-12, 3, shape)).astype(np.float32)


class Case:
    """A packed matrix and the numbers that it stands for."""

    def __init__(self, products: Products, scales: str, rows: int, cols: int, seed: int) -> None:
        self.layout = layout_of(scales)
        self.codes = codes_of(rows, cols, seed)
        self.scale = scale_of(scales, rows, cols, seed + 1)
        self.packed: Weight = products.pack(self.layout, rows, cols, self.codes, self.scale)
        scale = fp8.scale_of_elements(self.scale, rows, cols, GROUPS[scales])
        self.values: F64 = E4M3FN_VALUES[self.codes].astype(np.float64) * scale

    def assert_near(self, found: F32, x: F32) -> None:
        """Within the bound of docs/formats.md 8.2."""
        n = self.values.shape[1]
        wide = bf16_rounded(x)
        roundings = 128 + n // 128 + 1 if self.layout.group else n + 2
        flushed = 2 * n * TINY * np.maximum(1, np.abs(self.scale).max())
        bound = roundings * 2.0**-24 * (np.abs(wide) @ np.abs(self.values).T) + flushed
        assert_near(found, wide @ self.values.T, bound)


@pytest.mark.parametrize(("scales", "rows", "cols"), CASES)
def test_fp8_packing_is_the_reference(
    products: Products, scales: str, rows: int, cols: int
) -> None:
    case = Case(products, scales, rows, cols, 1)
    assert np.array_equal(case.packed.codes, packing.fp8(case.codes))
    assert case.packed.scale is not None
    expected = packing.fp8_scale(case.scale, rows, GROUPS[scales])
    assert np.array_equal(np.array(case.packed.scale).view(np.float32), expected)


def test_where_an_fp8_element_lies(products: Products) -> None:
    """docs/formats.md 8.2."""
    codes = np.zeros((64, 128), np.uint8)
    codes[37, 70] = 0x38
    packed = products.pack(layout_of("row"), 64, 128, codes, np.ones(64, np.float32))
    assert np.flatnonzero(packed.codes).tolist() == [6354]


@pytest.mark.parametrize(
    ("group", "scale", "rows", "cols"),
    [
        (128, "f32", 32, 64),
        (128, "f32", 16, 128),
        (0, "f32", 32, 32),
        (64, "f32", 32, 128),
        (128, "bf16", 32, 128),
        (0, "none", 32, 128),
    ],
)
def test_layouts_that_do_not_fit(
    products: Products, group: int, scale: str, rows: int, cols: int
) -> None:
    assert products.sizes(Layout.of("fp8", group, scale), rows, cols) == (0, 0)


@pytest.mark.parametrize("scales", GROUPS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_refused(products: Products, scales: str, code: int) -> None:
    codes = codes_of(64, 256, 2)
    codes[63, 255] = code
    with pytest.raises(Refused) as refusal:
        products.pack(layout_of(scales), 64, 256, codes, scale_of(scales, 64, 256, 3))
    assert refusal.value.status == STATUS_NONFINITE


@pytest.mark.parametrize("scales", GROUPS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_scale_is_refused(products: Products, scales: str, value: float) -> None:
    scale = scale_of(scales, 64, 256, 3)
    scale.reshape(-1)[-1] = value
    with pytest.raises(Refused) as refusal:
        products.pack(layout_of(scales), 64, 256, codes_of(64, 256, 2), scale)
    assert refusal.value.status == STATUS_NONFINITE


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 12, 13])
def test_every_code(products: Products, level: str, tokens: int) -> None:
    """Multiplied by one: decoding is exact, subnormal codes included."""
    layout = layout_of("row")
    products.use(layout, level)
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    codes = np.zeros((32, 256), np.uint8)
    codes[np.arange(254) % 32, np.arange(254)] = finite
    w = products.pack(layout, 32, 256, codes, np.ones(32, np.float32))
    for first in range(0, 256, tokens):
        x = np.zeros((tokens, 256), np.float32)
        columns = np.arange(first, min(first + tokens, 256))
        x[columns - first, columns] = 1
        found = products.everything(w, products.rows(layout, x))
        assert np.array_equal(found, x @ E4M3FN_VALUES[codes].T)


@pytest.mark.parametrize(("scales", "rows", "cols"), CASES)
def test_fp8_products_are_near_exact_ones(
    products: Products, level: str, scales: str, rows: int, cols: int
) -> None:
    products.use(layout_of(scales), level)
    case = Case(products, scales, rows, cols, 4)
    x = activations(13, cols, 5)
    case.assert_near(products.everything(case.packed, products.rows(case.layout, x)), x)


@pytest.mark.parametrize("scales", GROUPS)
@each("tokens", [*range(1, 34), 96])
def test_fp8_every_number_of_tokens(
    products: Products, level: str, scales: str, tokens: int
) -> None:
    products.use(layout_of(scales), level)
    case = Case(products, scales, 64, 1152, tokens)
    x = activations(tokens, 1152, tokens)
    case.assert_near(products.everything(case.packed, products.rows(case.layout, x)), x)


@pytest.mark.parametrize(
    ("scales", "rows", "cols"),
    [("block", 160, 640), ("block", 32, 7296), ("row", 160, 704), ("row", 32, 7232)],
)
def test_fp8_batch_independence(
    products: Products, level: str, scales: str, rows: int, cols: int
) -> None:
    products.use(layout_of(scales), level)
    case = Case(products, scales, rows, cols, 6)
    x = products.rows(case.layout, activations(96, cols, 7))
    assert_batch_independent(products, case.packed, x, least_tokens(level, "fp8"))


@pytest.mark.parametrize("scales", GROUPS)
@pytest.mark.parametrize("tokens", tile_tokens(AMX_LEAST["fp8"]))
def test_fp8_amx_loads_a_tile_per_product(
    products: Products, emulator: amx.Emulator, scales: str, tokens: int
) -> None:
    emulator.install()
    products.use(layout_of(scales), "amx")
    case = Case(products, scales, 64, 640, 6)
    x = products.rows(case.layout, activations(tokens, 640, 7))
    emulator.reset()
    products.product(case.packed, x, 0, 2)
    counts = emulator.counts()
    assert (counts.loads, counts.bf16_products) == tiles_of_strips(
        tokens, 2, 640, scaled=scales == "block"
    )
    assert counts.configs == 1


@pytest.mark.parametrize("scales", GROUPS)
@pytest.mark.parametrize("before", [1, 36, 63])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_fp8_unaligned_codes(
    products: Products, level: str, tokens: int, before: int, scales: str
) -> None:
    products.use(layout_of(scales), level)
    case = Case(products, scales, 96, 1152, 8)
    x = products.rows(case.layout, activations(tokens, 1152, 9))
    found = products.everything(case.packed.moved(before), x)
    assert np.array_equal(found, products.everything(case.packed, x))


@pytest.mark.parametrize("tokens", [1, 12, 25])
def test_nonfinite_activations_stay_in_their_token(
    products: Products, level: str, tokens: int
) -> None:
    layout = layout_of("block")
    products.use(layout, level)
    case = Case(products, "block", 64, 256, 10)
    x = activations(tokens, 256, 11)
    x[0, 3] = np.nan
    found = products.everything(case.packed, products.rows(layout, x))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()


@pytest.mark.parametrize("scales", GROUPS)
def test_the_widest_fp8_matrix(products: Products, level: str, scales: str) -> None:
    """Four strips at once: their scales fill the thread's scratch to its last byte."""
    products.use(layout_of(scales), level)
    case = Case(products, scales, 128, 32768, 14)
    x = activations(13, 32768, 15)
    rows = products.rows(case.layout, x)
    case.assert_near(products.product(case.packed, rows, 0, 4), x)
    assert products.sizes(case.layout, 128, 32768 + 128) == (0, 0)
