"""INT8 and INT4 products in KTransformers' layout: the same bits on every level."""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import pytest
from helpers import amx
from helpers.looped import each
from helpers.reference.kt_layout import pack_codes
from native.kernels.product import (
    AMX_LEAST,
    AMX_LEAST_GROUPS,
    COMPILED,
    F64,
    Array,
    Layout,
    Products,
    Refused,
    Weight,
    activations,
    assert_batch_independent,
    loads_per_product,
    sums_loaded_again,
    tile_tokens,
)

from ktconv.formats import FORMATS

pytestmark = pytest.mark.slow

KERNELS = ("int8", "int4")
LARGEST = {"int8": 127, "int4": 7}
STEP = {"int8": 1, "int4": 16}
# Several row blocks (64, 128), several column blocks (3584), odd multiples of a tile; more columns
# than INT4 unpacks at a time for AMX (8192).
SHAPES = [(32, 128), (64, 384), (160, 1152), (96, 3712), (256, 7296), (32, 16512)]


def layout_of(kernel: str) -> Layout:
    return Layout.of(kernel, 0, "f32")


def make(products: Products, kernel: str, rows: int, cols: int) -> tuple[Weight, Array, Array]:
    """A packed matrix, its codes int8 [rows, cols] and scales."""
    rng = np.random.default_rng([rows, cols])
    top = LARGEST[kernel]
    codes = rng.integers(-top, top + 1, (rows, cols), np.int8)
    codes[0], codes[-1] = top, -top
    scale = (rng.random(rows, np.float32) + np.float32(0.5)) * np.float32(1e-3)
    scale[rows // 2] = 0
    return products.pack(layout_of(kernel), rows, cols, codes, scale), codes, scale


def truth(kernel: str, codes: Array, scale: Array, x: Array) -> Array:
    """From the definition in int_gemm.h: exact integers, then three roundings to float32."""
    cols = codes.shape[1]
    x_codes = x[:, :cols].view(np.int8).astype(np.float64)
    x_scale = x[:, cols : cols + 4].copy().view(np.float32)
    sums: F64 = x_codes @ codes.T.astype(np.float64)
    result: Array = sums.astype(np.float32) * (np.float32(STEP[kernel]) * scale) * x_scale
    return result


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_packing_is_that_of_the_files(
    products: Products, kernel: str, rows: int, cols: int
) -> None:
    weight, codes, scale = make(products, kernel, rows, cols)
    expected = pack_codes(FORMATS[kernel], codes)
    assert np.array_equal(weight.codes, expected)
    assert weight.scale is not None
    assert np.array_equal(np.array(weight.scale).view(np.float32), scale)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 4, 13, 37])
def test_integer_products_are_the_reference(
    products: Products, level: str, kernel: str, rows: int, cols: int, tokens: int
) -> None:
    products.use(layout_of(kernel), level)
    weight, codes, scale = make(products, kernel, rows, cols)
    x = products.rows(layout_of(kernel), activations(tokens, cols, tokens))
    found = products.everything(weight, x)
    assert np.array_equal(found.view(np.uint32), truth(kernel, codes, scale, x).view(np.uint32))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cols", [256, 2176])  # AMX cuts INT8 into chunks of 1024
@each("tokens", [*range(1, 36), 49, 63, 64, 67, 81, 95, 96])
def test_integer_every_number_of_tokens(
    products: Products, level: str, kernel: str, tokens: int, cols: int
) -> None:
    products.use(layout_of(kernel), level)
    weight, codes, scale = make(products, kernel, 64, cols)
    x = products.rows(layout_of(kernel), activations(tokens, cols, tokens))
    assert np.array_equal(products.everything(weight, x), truth(kernel, codes, scale, x))


@pytest.mark.parametrize("kernel", KERNELS)
def test_integer_batch_independence(products: Products, level: str, kernel: str) -> None:
    products.use(layout_of(kernel), level)
    weight, _, _ = make(products, kernel, 96, 3712)
    x = products.rows(layout_of(kernel), activations(96, 3712, 5))
    assert_batch_independent(products, weight, x)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("before", [1, 36, 63])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_integer_unaligned_codes(
    products: Products, level: str, kernel: str, tokens: int, before: int
) -> None:
    products.use(layout_of(kernel), level)
    weight, _, _ = make(products, kernel, 96, 1152)
    x = products.rows(layout_of(kernel), activations(tokens, 1152, 7))
    assert np.array_equal(
        products.everything(weight.moved(before), x), products.everything(weight, x)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_largest_sums(products: Products, level: str, kernel: str) -> None:
    """All codes at their limits, as many columns as a matrix may have: nothing wraps."""
    products.use(layout_of(kernel), level)
    cols, top = 32768, LARGEST[kernel]
    codes = np.full((32, cols), top, np.int8)
    codes[1::2] = -top
    weight = products.pack(layout_of(kernel), 32, cols, codes, np.ones(32, np.float32))
    x = products.rows(layout_of(kernel), np.full((6, cols), -3.0, np.float32))
    expected = truth(kernel, codes, np.ones(32, np.float32), x)
    assert np.array_equal(products.everything(weight, x), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_activation_rows(products: Products, level: str, kernel: str) -> None:
    """Codes, scale and sum by their definition, zeros and NaN included."""
    products.use(layout_of(kernel), level)
    x = activations(5, 256, 1)
    x[1] = 0
    x[2] = 1e-42
    x[3, 9] = np.inf
    rows = products.rows(layout_of(kernel), x)
    codes, scale = rows[:, :256].view(np.int8), rows[:, 256:260].copy().view(np.float32)[:, 0]
    sums = rows[:, 260:264].copy().view(np.int32)[:, 0]
    for t in (0, 4):
        expected = np.abs(x[t]).max() * np.float32(1 / 127)
        assert scale[t] == expected
        assert np.array_equal(codes[t], np.rint(x[t] * (np.float32(1) / expected)))
    assert not codes[1:4].any()
    assert scale[1] == 0
    assert scale[2] == 0
    assert np.isnan(scale[3])
    assert np.array_equal(sums, codes.astype(np.int32).sum(axis=1))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nonfinite_activations_reach_their_token_only(
    products: Products, level: str, kernel: str
) -> None:
    products.use(layout_of(kernel), level)
    weight, _, _ = make(products, kernel, 64, 256)
    x = activations(14, 256, 2)
    x[3, 7], x[9, 0] = np.nan, -np.inf
    found = products.everything(weight, products.rows(layout_of(kernel), x))
    assert np.isnan(found[[3, 9]]).all()
    assert np.isfinite(np.delete(found, [3, 9], axis=0)).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_integer_scales_must_be_finite(products: Products, kernel: str, value: float) -> None:
    scale = np.ones(32, np.float32)
    scale[5] = value
    with pytest.raises(Refused):
        products.pack(layout_of(kernel), 32, 128, np.zeros((32, 128), np.int8), scale)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "cols"), [(16, 128), (32, 32), (32, 0), (32, 32768 + 128)])
def test_integer_shapes_that_do_not_fit(
    products: Products, kernel: str, rows: int, cols: int
) -> None:
    assert products.sizes(layout_of(kernel), rows, cols) == (0, 0)


@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [(kernel, tokens) for kernel in KERNELS for tokens in tile_tokens(AMX_LEAST[kernel])],
)
def test_integer_amx_loads_a_tile_per_product(
    products: Products, kernel: str, emulator: amx.Emulator, tokens: int
) -> None:
    """And configures once for whole blocks of 32 tokens, once for the rest."""
    emulator.install()
    products.use(layout_of(kernel), "amx")
    weight, _, _ = make(products, kernel, 64, 3712)
    x = products.rows(layout_of(kernel), activations(tokens, 3712, 3))
    emulator.reset()
    products.product(weight, x, 0, 2)
    counts, (loads, needed) = emulator.counts(), loads_per_product(tokens)
    steps = 2 * 3712 // 64  # strips, columns
    # 56 steps of a column block are 4 chunks, 2 of the other are one; INT4 has none.
    again = sums_loaded_again(tokens, 2, 5) if kernel == "int8" else 0
    assert (counts.loads, counts.int8_products) == (steps * loads + again, steps * needed)
    assert counts.loads - again <= counts.products or tokens % 32 in range(1, 17)
    assert counts.configs == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are those of x86-64")
def test_tiles_are_used_from_the_measured_number_of_tokens() -> None:
    """Results do not tell: integers are exact with tiles and without."""
    library = ctypes.CDLL(str(COMPILED))
    library.kt_least_tokens.restype = ctypes.c_int64
    measured = {(kernel, 0): AMX_LEAST[kernel] for kernel in KERNELS}
    for kernel, groups in AMX_LEAST_GROUPS.items():
        measured |= {(kernel, group): least for group, least in groups.items()}
    for (kernel, group), least in measured.items():
        layout = Layout.of(kernel, group, "f32")
        assert library.kt_least_tokens(ctypes.byref(layout)) == least, (kernel, group)
