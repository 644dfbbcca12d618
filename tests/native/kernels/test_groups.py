"""MXFP4, MXFP8, and integers in groups: scales per group of columns."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import amx
from helpers.looped import each
from helpers.reference import packing
from native.kernels.product import (
    AMX_LEAST,
    AMX_LEAST_GROUPS,
    F32,
    F64,
    STATUS_NONFINITE,
    U8,
    Array,
    Layout,
    Products,
    Refused,
    activations,
    assert_batch_independent,
    assert_near,
    bf16_rounded,
    least_tokens,
    loads_per_product,
    tile_tokens,
    tiles_of_strips,
)

from ktconv.formats import groups, mxfp4
from ktconv.formats.decode import E4M3FN_VALUES, bf16_to_f32, f32_to_bf16

pytestmark = pytest.mark.slow

KINDS = {
    "mxfp4-ue8m0": ("mxfp4", 32, "ue8m0"),
    "mxfp4-bf16": ("mxfp4", 32, "bf16"),
    "mxfp8-ue8m0": ("mxfp8", 32, "ue8m0"),
    "gint4-32-bf16": ("gint4", 32, "bf16"),
    "gint4-64-f32": ("gint4", 64, "f32"),
    "gint4-128-bf16": ("gint4", 128, "bf16"),
    "gint4-128-f32": ("gint4", 128, "f32"),
    "gint8-32-f32": ("gint8", 32, "f32"),
    "gint8-64-bf16": ("gint8", 64, "bf16"),
    "gint8-128-bf16": ("gint8", 128, "bf16"),
}
EXACT = [kind for kind in KINDS if kind.startswith("gint")]
SHAPES = [(32, 128), (160, 384), (96, 1152), (64, 2176), (32, 7168), (64, 7296)]
TINY = 2.0**-126
BYTES = ("gint8", "mxfp8")
NUMBERS = {"mxfp4": mxfp4.VALUES, "mxfp8": E4M3FN_VALUES}


def least_of(kind: str, level: str) -> int:
    """As least_tokens; products of GINT4 are exact on every level."""
    return 1 if kind in EXACT else least_tokens(level, KINDS[kind][0])


def plain(kernel: str, codes: U8) -> U8:
    """Codes as kt_pack takes them."""
    return codes if kernel in BYTES else groups.nibbles(codes)


class Case:
    """A packed matrix; `values` are the numbers that it stands for."""

    def __init__(self, products: Products, kind: str, rows: int, cols: int, seed: int) -> None:
        kernel, self.group, self.dtype = KINDS[kind]
        self.kernel, self.products = kernel, products
        self.layout = Layout.of(*KINDS[kind])
        rng = np.random.default_rng([seed, rows, cols])
        bits = 8 if kernel in BYTES else 4
        self.zero = 2.0 ** (bits - 1)
        self.codes: U8 = rng.integers(0, 2**bits, (rows, cols), np.uint8)
        if kernel == "mxfp8":
            self.codes[self.codes & 0x7F == 0x7F] ^= 0x40  # NaN
        self.stored = self._scales(rng, (rows, cols // self.group))
        self.packed = products.pack(self.layout, rows, cols, plain(kernel, self.codes), self.stored)
        numbers = NUMBERS.get(kernel)
        units = self.codes - self.zero if numbers is None else numbers[self.codes]
        self.values: F64 = units * self.scale.astype(np.float64).repeat(self.group, axis=1)

    def _scales(self, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
        if self.dtype == "ue8m0":
            return rng.integers(110, 132, shape, np.uint8)
        values = (rng.uniform(0.5, 2, shape) * 2.0 ** rng.integers(-12, 3, shape)).astype("f4")
        return values if self.dtype == "f32" else f32_to_bf16(values)

    @property
    def scale(self) -> F32:
        if self.dtype == "ue8m0":
            return np.ldexp(np.float32(1), self.stored.astype(np.int32) - 127)
        return self.stored if self.dtype == "f32" else bf16_to_f32(self.stored)

    def rows_of(self, x: F32) -> U8:
        return self.products.rows(self.layout, x)

    def check(self, found: F32, x: F32) -> None:
        """docs/formats.md 8.3: a bound; 8.4: bits."""
        if self.kernel not in NUMBERS:
            assert np.array_equal(found.view(np.uint32), self.exact(x).view(np.uint32))
            return
        wide = bf16_rounded(x)
        n = self.values.shape[1]
        roundings = 32 + n // 32 + 2
        flushed = 2 * n * TINY * max(1.0, float(np.abs(self.scale).max()))
        bound = roundings * 2.0**-24 * (np.abs(wide) @ np.abs(self.values).T) + flushed
        assert_near(found, wide @ self.values.T, bound)

    def exact(self, x: F32) -> F32:
        """gint4.h's definition: exact integers, scales multiplied first, one fused operation a
        group. A float64 holds product and sum of 24-bit numbers nearly: rounding it to float32
        is the fused operation, but for ties that these values do not meet."""
        cols, count = x.shape[1], x.shape[1] // self.group
        rows = self.rows_of(x)
        codes = rows[:, :cols].view(np.int8).astype(np.float64)
        start = -(-cols // 64) * 64
        x_scale = rows[:, start : start + 4 * count].copy().view(np.float32)
        total = np.zeros((len(x), len(self.codes)), np.float32)
        for g in range(count):
            cut = slice(g * self.group, (g + 1) * self.group)
            sums = codes[:, cut] @ (self.codes[:, cut].astype(np.float64) - self.zero).T
            scales = x_scale[:, g, None] * self.scale[None, :, g]
            total = (sums * scales.astype(np.float64) + total).astype(np.float32)
        return total


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_group_packing_is_the_reference(
    products: Products, kind: str, rows: int, cols: int
) -> None:
    case = Case(products, kind, rows, cols, 1)
    pack = {"mxfp8": packing.fp8}.get(case.kernel) or vars(packing)[case.kernel]
    expected = pack(case.codes)
    assert np.array_equal(case.packed.codes, expected)
    assert case.packed.scale is not None
    assert np.array_equal(case.packed.scale, groups.pack_scale(case.stored).view(np.uint8))


def test_where_elements_lie(products: Products) -> None:
    """docs/formats.md 8.3 to 8.5."""
    elements = (
        ("mxfp4-ue8m0", 37, 2645, 0),
        ("mxfp8-ue8m0", 37, 5330, 0),
        ("gint4-32-bf16", 37, 2646, 0),
        ("gint4-32-bf16", 53, 2646, 4),
        ("gint8-32-f32", 37, 5270, 0),
        ("gint8-32-f32", 53, 5334, 0),
    )
    for kind, row, byte, shift in elements:
        codes = np.zeros((64, 96), np.uint8)
        codes[row, 70] = 15
        layout = Layout.of(*KINDS[kind])
        numbers = {"ue8m0": np.uint8, "bf16": np.uint16, "f32": np.float32}
        scale = np.zeros((64, 3), numbers[kind.rpartition("-")[2]])
        packed = products.pack(layout, 64, 96, plain(kind[:5], codes), scale).codes
        assert np.flatnonzero(packed).tolist() == [byte], kind
        assert packed[byte] == 15 << shift, kind


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_group_products_are_near_exact_ones(
    products: Products, level: str, kind: str, rows: int, cols: int
) -> None:
    products.use(Layout.of(*KINDS[kind]), level)
    case = Case(products, kind, rows, cols, 2)
    x = activations(13, cols, 3)
    case.check(products.everything(case.packed, case.rows_of(x)), x)


@pytest.mark.parametrize(
    "kind", ["mxfp4-ue8m0", "mxfp8-ue8m0", "gint4-32-bf16", "gint4-128-f32", "gint8-64-bf16"]
)
@each("tokens", [*range(1, 34), 96])
def test_group_every_number_of_tokens(
    products: Products, level: str, kind: str, tokens: int
) -> None:
    products.use(Layout.of(*KINDS[kind]), level)
    case = Case(products, kind, 64, 256, tokens)
    x = activations(tokens, 256, tokens)
    case.check(products.everything(case.packed, case.rows_of(x)), x)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("rows", "cols"), [(160, 640), (64, 2176), (32, 4224)])
def test_group_batch_independence(
    products: Products, level: str, kind: str, rows: int, cols: int
) -> None:
    products.use(Layout.of(*KINDS[kind]), level)
    case = Case(products, kind, rows, cols, 4)
    x = case.rows_of(activations(96, cols, 5))
    assert_batch_independent(products, case.packed, x, least_of(kind, level))


@pytest.mark.parametrize("kind", ["mxfp4-ue8m0", "mxfp8-ue8m0", "gint4-32-bf16", "gint8-32-f32"])
@pytest.mark.parametrize("cols", [32, 96, 2080, 4128])
def test_odd_numbers_of_groups(products: Products, level: str, kind: str, cols: int) -> None:
    """The fewest tokens take MXFP4's groups in pairs."""
    products.use(Layout.of(*KINDS[kind]), level)
    case = Case(products, kind, 64, cols, 8)
    x = activations(13, cols, 9)
    least = least_of(kind, level)
    case.check(assert_batch_independent(products, case.packed, case.rows_of(x), least), x)


@pytest.mark.parametrize("kind", ["mxfp4-ue8m0", "mxfp4-bf16", "mxfp8-ue8m0"])
@pytest.mark.parametrize("tokens", tile_tokens(AMX_LEAST["mxfp4"]))
def test_group_amx_loads_a_tile_per_product(
    products: Products, emulator: amx.Emulator, kind: str, tokens: int
) -> None:
    """Whether scales are taken into the tiles or multiplied after the sums."""
    emulator.install()
    products.use(Layout.of(*KINDS[kind]), "amx")
    case = Case(products, kind, 64, 544, 6)
    x = case.rows_of(activations(tokens, 544, 7))
    emulator.reset()
    products.product(case.packed, x, 0, 2)
    counts = emulator.counts()
    assert (counts.loads, counts.bf16_products) == tiles_of_strips(
        tokens, 2, 544, scaled=kind == "mxfp4-bf16"
    )
    assert counts.configs == 1


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        (kind, tokens)
        for kind in EXACT
        for tokens in tile_tokens(AMX_LEAST_GROUPS[KINDS[kind][0]][int(KINDS[kind][1])])
    ],
)
def test_amx_loads_a_tile_per_product_of_int8(
    products: Products, emulator: amx.Emulator, kind: str, tokens: int
) -> None:
    """A product takes 64 columns, or the 32 of a group, whose tiles are as narrow. Sums are stored
    once a group; more columns than are unpacked at a time change nothing."""
    emulator.install()
    products.use(Layout.of(*KINDS[kind]), "amx")
    case, cols = Case(products, kind, 64, 2176, 6), 2176
    x = case.rows_of(activations(tokens, cols, 7))
    emulator.reset()
    products.product(case.packed, x, 0, 2)
    counts, (loads, needed) = emulator.counts(), loads_per_product(tokens)
    steps = 2 * cols // min(case.group, 64)  # strips, columns
    assert (counts.loads, counts.int8_products) == (steps * loads, steps * needed)
    assert counts.loads <= counts.products or tokens % 32 in range(1, 17)
    assert counts.stores == 2 * cols // case.group * needed
    assert counts.configs == 1


@pytest.mark.parametrize(
    "kind", ["mxfp4-bf16", "mxfp8-ue8m0", "gint4-32-bf16", "gint4-64-f32", "gint8-64-bf16"]
)
@each("before", [1, 36, 63])
@each("tokens", [1, 5, 30])
def test_group_unaligned_codes(
    products: Products, level: str, kind: str, tokens: int, before: int
) -> None:
    products.use(Layout.of(*KINDS[kind]), level)
    case = Case(products, kind, 96, 1152, 6)
    x = case.rows_of(activations(tokens, 1152, 7))
    moved = products.everything(case.packed.moved(before), x)
    assert np.array_equal(moved, products.everything(case.packed, x))


@pytest.mark.parametrize(("kind", "one"), [("mxfp4-ue8m0", 2), ("mxfp8-ue8m0", 0x38)])
@pytest.mark.parametrize("tokens", [1, 14, 40])
def test_extreme_scales(products: Products, level: str, tokens: int, kind: str, one: int) -> None:
    """2^-127, the one scale that is a denormal, and the largest."""
    products.use(Layout.of(*KINDS[kind]), level)
    codes = np.full((32, 64), one, np.uint8)  # 1.0
    scale = np.zeros((32, 2), np.uint8)
    scale[1::2] = 254
    packed = products.pack(Layout.of(*KINDS[kind]), 32, 64, plain(kind[:5], codes), scale)
    x = np.full((tokens, 64), 2.0**-5, np.float32)
    found = products.everything(packed, products.rows(Layout.of(*KINDS[kind]), x))
    assert (found[:, ::2] == 2.0**-126).all()
    x[:] = 2.0**-8
    found = products.everything(packed, products.rows(Layout.of(*KINDS[kind]), x))
    assert (found[:, 1::2] == 2.0**125).all()


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("mxfp4-ue8m0", 255),
        ("mxfp8-ue8m0", 255),
        ("mxfp4-bf16", 0x7F80),
        ("gint4-32-bf16", 0xFFC0),
        ("gint4-64-f32", np.nan),
        ("gint4-64-f32", -np.inf),
    ],
)
def test_group_scales_must_be_finite(products: Products, kind: str, bad: float) -> None:
    _, group, dtype = KINDS[kind]
    kinds = {"ue8m0": np.uint8, "bf16": np.uint16, "f32": np.float32}
    scale = np.zeros((32, 128 // group), kinds[dtype])
    scale[31, -1] = bad
    with pytest.raises(Refused):
        codes = plain(kind[:5], np.zeros((32, 128), np.uint8))
        products.pack(Layout.of(*KINDS[kind]), 32, 128, codes, scale)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_of_mxfp8_is_refused(products: Products, code: int) -> None:
    codes = np.zeros((64, 96), np.uint8)
    codes[63, 95] = code
    with pytest.raises(Refused) as refusal:
        products.pack(Layout.of("mxfp8", 32, "ue8m0"), 64, 96, codes, np.zeros((64, 3), np.uint8))
    assert refusal.value.status == STATUS_NONFINITE


@pytest.mark.parametrize("power", [9, 10, 127, 246, 247])
@pytest.mark.parametrize("tokens", [1, 33])
def test_every_code_of_mxfp8(products: Products, level: str, power: int, tokens: int) -> None:
    """Multiplied by one: products of codes and scales are exact, in whichever of the ways of AMX,
    also next to the smallest and the largest numbers; only what is denormal may be 0."""
    layout = Layout.of("mxfp8", 32, "ue8m0")
    products.use(layout, level)
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    codes = np.zeros((32, 256), np.uint8)
    codes[np.arange(254) % 32, np.arange(254)] = finite
    w = products.pack(layout, 32, 256, codes, np.full((32, 8), power, np.uint8))
    scaled = np.ldexp(E4M3FN_VALUES[codes].astype(np.float64), power - 127)
    with np.errstate(over="ignore"):
        exact = scaled.astype(np.float32)
    for first in range(0, 256, tokens):
        x = np.zeros((tokens, 256), np.float32)
        columns = np.arange(first, min(first + tokens, 256))
        x[columns - first, columns] = 1
        found = products.everything(w, products.rows(layout, x))[: len(columns)]
        expected = exact[:, columns].T
        denormal = (np.abs(expected) < TINY) & (found == 0)
        assert np.array_equal(np.where(denormal, expected, found), expected)


def test_the_widest_mxfp8_matrix(products: Products, level: str) -> None:
    """Scales of a strip fill the thread's scratch to its last byte."""
    kind = "mxfp8-ue8m0"
    products.use(Layout.of(*KINDS[kind]), level)
    case = Case(products, kind, 64, 32768, 14)
    x = activations(13, 32768, 15)
    case.check(products.product(case.packed, case.rows_of(x), 0, 2), x)


@pytest.mark.parametrize("kind", list(KINDS))
def test_group_shapes_that_do_not_fit(products: Products, kind: str) -> None:
    group = KINDS[kind][1]
    for rows, cols in ((16, 128), (32, group // 2), (33, 128), (32, 128 + group - 16), (0, 128)):
        assert products.sizes(Layout.of(*KINDS[kind]), rows, cols) == (0, 0)


@pytest.mark.parametrize(
    "layout",
    [
        ("gint4", 48, "bf16"),
        ("gint8", 0, "f32"),
        ("gint4", 32, "ue8m0"),
        ("mxfp4", 64, "ue8m0"),
        ("mxfp4", 32, "f32"),
        ("mxfp8", 32, "bf16"),
        ("mxfp8", 0, "ue8m0"),
    ],
)
def test_products_of_layouts_that_do_not_exist(
    products: Products, layout: tuple[str, int, str]
) -> None:
    assert products.sizes(Layout.of(*layout), 32, 192) == (0, 0)


@pytest.mark.parametrize("kind", ["mxfp4-ue8m0", "mxfp8-ue8m0"])
@pytest.mark.parametrize("cols", [96, 512, 2176])
@each("tokens", [1, 2, 17, 33, 64])
def test_strips_with_and_without_the_outermost_powers(
    products: Products, level: str, kind: str, cols: int, tokens: int
) -> None:
    """AMX takes one way after the other: what is unpacked beside a strip is of the next one."""
    products.use(Layout.of(*KINDS[kind]), level)
    case = Case(products, kind, 192, cols, 16)
    case.stored[40, -1] = 250
    case.stored[70, 0] = 5
    case.stored[130, cols // 64] = 3
    packed = products.pack(case.layout, 192, cols, plain(case.kernel, case.codes), case.stored)
    numbers = NUMBERS[case.kernel][case.codes]
    case.values = numbers * case.scale.astype(np.float64).repeat(case.group, axis=1)
    x = activations(tokens, cols, 17) * np.float32(2.0**-12)
    found = products.everything(packed, case.rows_of(x))
    wide = bf16_rounded(x)
    size = np.abs(wide).astype(np.float64) @ np.abs(case.values).T
    assert (np.abs(found - wide @ case.values.T) <= size * (cols * 2.0**-23) + cols * TINY).all()
