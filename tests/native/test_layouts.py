"""Layouts of every format: plain codes and scales that any quantizer may have chosen, packed
and unpacked, and the quantizer by largest magnitude with scales per group."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from helpers import reference
from helpers.looped import each
from helpers.reference import packing
from helpers.reference.kt_layout import TILINGS
from msgspec.structs import replace
from native.support import STORED, Rule, Source, assert_same, every_rule, guarded

from ktconv import native
from ktconv.formats import Format, groups, output_formats
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.formats.table import FORMATS as METHODS
from ktconv.native import FORMATS, SCALE_DTYPES, Layout

pytestmark = pytest.mark.slow

LAYOUTS = [
    Layout("int8"),
    Layout("int4"),
    Layout("bf16", 0, "none"),
    Layout("fp8"),
    Layout("fp8", 128),
    Layout("mxfp4", 32, "ue8m0"),
    Layout("mxfp4", 32, "bf16"),
    Layout("mxfp8", 32, "ue8m0"),
    Layout("nvfp4"),
    *(Layout("gint4", group, dtype) for group in (32, 64, 128) for dtype in ("f32", "bf16")),
    Layout("gint8", 32, "f32"),
    Layout("gint8", 64, "bf16"),
    Layout("gint8", 128, "bf16"),
]
GROUPED = [layout for layout in LAYOUTS if layout.format in ("gint4", "gint8")]


def name_of(layout: Layout) -> str:
    return f"{layout.format}-{layout.group}-{layout.scale_dtype}"


layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)


def some_codes(layout: Layout, rows: int, cols: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    if largest := layout.traits.max_level if layout.code_array == np.int8 else 0:
        return rng.integers(-largest, largest + 1, (rows, cols), np.int8)
    width = layout.code_shape(rows, cols)[1]
    codes = rng.integers(0, 256, (rows, width * layout.code_array.itemsize), np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # the NaN of FP8
    return codes.view(layout.code_array)


def some_scales(layout: Layout, rows: int, cols: int) -> np.ndarray | None:
    if layout.scale_dtype == "none":
        return None
    values = np.random.default_rng(6).uniform(0.1, 2, layout.scale_shape(rows, cols))
    match layout.scale_dtype:
        case "f32":
            return values.astype(np.float32)
        case "bf16":
            return f32_to_bf16(values.astype(np.float32))
    return (values * 100).astype(np.uint8)


@layouts
def test_codes_at_guard_pages(layout: Layout) -> None:
    """Plain codes and packed bytes are read, and written, no further than they go."""
    codes = some_codes(layout, 64, 256)
    packed = native.pack(layout, codes)
    with guarded(codes.nbytes) as plain, guarded(packed.nbytes) as room:
        plain[:] = codes.reshape(-1).view(np.uint8)
        inside = plain.view(codes.dtype).reshape(codes.shape)
        scale = some_scales(layout, 64, 256)
        native.pack_weight(layout, 64, 256, inside, scale, room)
        assert_same("packed", room, packed)
        assert_same("codes", native.unpack(layout, room, 64, 256), codes)
        del inside


@layouts
@pytest.mark.parametrize("shape", [(32, 128), (96, 384), (160, 3584 + 128)])
def test_given_codes_and_scales_come_back(layout: Layout, shape: tuple[int, int]) -> None:
    codes, scale = some_codes(layout, *shape), some_scales(layout, *shape)
    packed = np.full(layout.weight_size(*shape), 0x5A, np.uint8)
    packed_scale = native.pack_weight(layout, *shape, codes, scale, packed)
    assert_same("codes alone", native.pack(layout, codes), packed)
    found = native.unpack_weight(layout, *shape, packed, None if scale is None else packed_scale)
    assert_same("codes", found[0], codes)
    if scale is None:
        assert found[1] is None
    else:
        assert found[1] is not None
        assert_same("scales", found[1], scale)


@layouts
def test_sizes_follow_from_the_traits(layout: Layout) -> None:
    traits = layout.traits
    rows, cols = 2 * traits.row_multiple, 3 * traits.col_multiple
    inner = rows * cols // 32 * traits.inner_scales
    assert layout.weight_size(rows, cols) == rows * cols * traits.bits // 8 + inner
    assert layout.cols_of(layout.code_shape(rows, cols)[1]) == cols
    assert layout.multiplies(rows, cols)
    for shape in ((rows + 1, cols), (rows, cols + traits.col_multiple // 2)):
        assert layout.weight_size(*shape) == layout.scale_size(*shape) == 0
        assert not layout.multiplies(*shape)
    if layout.scale_dtype == "none":
        assert layout.scale_size(rows, cols) == traits.scale_size == 0
    elif layout.format != "fp8" or not layout.group:
        count = int(np.prod(layout.scale_shape(rows, cols)))
        assert layout.scale_size(rows, cols) == count * traits.scale_size


# SPEC 4.1: bits, KT, bytes of a scale, levels, scales per step.
SPECIFIED = {"int4": (4, 128, 4, 7, 16), "int8": (8, 64, 4, 127, 1)}


@pytest.mark.parametrize("row", output_formats().values(), ids=list(output_formats()))
def test_the_table_follows_the_specification(row: Format) -> None:
    traits, layout = row.traits, row.layout
    bits, k_tile, scale_size, max_level, scale_units = SPECIFIED[row.key]
    tiling = TILINGS[row.code]
    assert (traits.bits, traits.col_multiple) == (bits, k_tile) == (tiling.bits, tiling.k_tile)
    assert (traits.row_multiple, traits.scale_size) == (32, scale_size)
    assert (traits.max_level, traits.scale_units) == (max_level, scale_units)
    for rows, cols in ((32, k_tile), (5 * 32, 3 * k_tile)):
        assert layout.weight_size(rows, cols) == rows * cols * bits // 8
        assert layout.scale_size(rows, cols) == rows * scale_size


def test_packed_scales_lie_where_the_kernels_read_them() -> None:
    grouped, block = Layout("gint4", 32, "bf16"), Layout("fp8", 128)
    for layout, expected in (
        (grouped, lambda scale: groups.pack_scale(scale)),
        (block, lambda scale: packing.fp8_scale(scale, 160, 128)),
    ):
        scale = some_scales(layout, 160, 256)
        packed = np.empty(layout.weight_size(160, 256), np.uint8)
        found = native.pack_weight(layout, 160, 256, some_codes(layout, 160, 256), scale, packed)
        assert_same("scales", found, expected(scale))


# Groups, dtypes of scales, and scales per step of each format.
EXISTING = {
    "int8": ((0,), ("f32",), 1),
    "int4": ((0,), ("f32",), 16),
    "bf16": ((0,), ("none",), 1),
    "fp8": ((0, 128), ("f32",), 1),
    "mxfp4": ((32,), ("bf16", "ue8m0"), 1),
    "gint4": ((32, 64, 128), ("f32", "bf16"), 1),
    "gint8": ((32, 64, 128), ("f32", "bf16"), 1),
    "nvfp4": ((0,), ("f32",), 1),
    "mxfp8": ((32,), ("ue8m0",), 1),
}


@pytest.mark.parametrize("format", FORMATS)
def test_layouts_exist_as_listed_and_no_others(format: str) -> None:
    listed, dtypes, scale_units = EXISTING[format]
    for group, dtype in product((-1, 0, 1, 16, 32, 64, 128, 256), SCALE_DTYPES):
        layout = Layout(format, group, dtype)
        if group in listed and dtype in dtypes:
            assert layout.traits.scale_units == scale_units
            assert layout.weight_size(128, 256) > 0
        else:
            with pytest.raises(ValueError, match="does not exist"):
                layout.traits  # noqa: B018
            assert layout.weight_size(128, 256) == layout.scale_size(128, 256) == 0


# The quantizer by largest magnitude, scales per group


def by_amax(layout: Layout, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """docs/formats.md 8.4, 8.5: codes -7..7 or -127..127 [N, K], scales float32 [N, K / group]."""
    rows, cols = values.shape
    tiny = np.float32(2.0**-126)
    grouped = values.reshape(rows, cols // layout.group, layout.group)
    amax = np.abs(grouped).max(axis=2)
    scale = (amax.astype(np.float64) / 7).astype(np.float32)
    if layout.format == "gint8":
        scale = amax * np.float32(1 / 127)
    scale[scale < tiny] = 0
    if layout.scale_dtype == "bf16":
        scale = bf16_to_f32(f32_to_bf16(scale))
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=scale != 0)
    kept = np.where(np.abs(grouped) < tiny, np.float32(0), grouped)
    codes = np.rint(kept * inverse[:, :, None]).astype(np.int8)
    return codes.reshape(rows, cols), scale


@lru_cache(maxsize=256)
def expected_groups(layout: Layout, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales under the source's choice, as by_amax returns them; the same for every
    level."""
    if source.rule == "amax":
        return by_amax(layout, source.values())
    row = METHODS[f"{layout.format}-32"]
    fmt = replace(row, group=layout.group, scale_dtype=layout.scale_dtype)
    plain, scale = reference.quantize(fmt, source.values(), source.reference_choice)
    wide = scale if layout.scale_dtype == "f32" else bf16_to_f32(scale)
    stored = groups.unpacked_nibbles(plain) if layout.format == "gint4" else plain
    return (stored.astype(np.int16) - layout.traits.code_bias).astype(np.int8), wide


@pytest.mark.parametrize("layout", GROUPED, ids=name_of)
@every_rule
@each("dtype", STORED)
@each("transposed", [False, True])
def test_group_scales(
    isa: str,
    layout: Layout,
    dtype: str,
    transposed: bool,
    rule: Rule,
    weighted: bool,
) -> None:
    rows, cols = (96, 640) if rule == "amax" else (32, 384)
    source = Source(
        "int4", rows, cols, dtype, transposed=transposed, seed=layout.group, rule=rule,
        weighted=weighted, factored=transposed,
    )  # fmt: skip
    codes, scale = native.quantize(layout, source.matrix(), source.choice)
    expected, scales = expected_groups(layout, source)
    stored = (expected.astype(np.int16) + layout.traits.code_bias).astype(np.uint8)
    assert np.abs(expected).max() == layout.traits.max_level
    nibbles = layout.format == "gint4"
    assert_same("codes", codes, groups.nibbles(stored) if nibbles else stored)
    wide = scale if layout.scale_dtype == "f32" else bf16_to_f32(scale)
    assert_same("scales", wide, scales)
    packed = np.full(layout.weight_size(rows, cols), 0x5A, np.uint8)
    packed_scale = np.full(layout.scale_size(rows, cols), 0x5A, np.uint8)
    native.quantize_pack(layout, source.matrix(), packed, packed_scale, choice=source.choice)
    assert_same("packed", packed, (packing.gint4 if nibbles else packing.gint8)(stored))
    assert_same("packed scales", packed_scale, groups.pack_scale(scale))
    again = np.empty_like(packed)
    assert_same(
        "scales of pack", native.pack_weight(layout, rows, cols, codes, scale, again), packed_scale
    )
    assert_same("pack(quantize)", again, packed)
    if rule != "amax":
        return
    step = np.repeat(scales.astype(np.float64), layout.group, axis=1)
    top, rounded = layout.traits.max_level, 0.5 + (2.0**-20 if nibbles else 2.0**-15)
    bound = np.where(step == 0, top * 2.0**-126, np.maximum(rounded * step, 2.0**-126))
    assert (np.abs(source.values() - expected * step) <= bound).all()


def test_a_group_that_is_not_finite_is_named() -> None:
    values = np.ones((32, 128), np.float32)
    values[3, 70] = np.nan
    matrix = native.Matrix(values.reshape(-1).view(np.uint8), "F32", 32, 128)
    with pytest.raises(native.NonFiniteError, match="row 3, column 70"):
        native.quantize(Layout("gint4", 32, "bf16"), matrix)


@layouts
def test_what_the_library_does_not_do_is_refused(layout: Layout) -> None:
    matrix = native.Matrix(np.zeros(32 * 128 * 4, np.uint8), "F32", 32, 128)
    packed = np.empty(layout.weight_size(32, 128), np.uint8)
    if not layout.traits.max_level:
        scale = np.empty(layout.scale_size(32, 128), np.uint8)
        with pytest.raises(ValueError, match="does not do that with this layout"):
            native.quantize_pack(layout, matrix, packed, scale)
    if layout.format not in ("int8", "int4", "gint4", "gint8"):
        with pytest.raises(ValueError, match="does not do that with this layout"):
            native.audit_codes(layout, packed, 32, 128)


def test_codes_that_are_no_numbers_are_not_packed() -> None:
    """E4M3 has a NaN, and kt_pack does not say where it is."""
    layout = Layout("fp8")
    codes, scale = np.zeros((32, 64), np.uint8), np.ones(32, np.float32)
    codes[3, 5] = 0x7F
    packed = native.aligned_bytes(layout.weight_size(32, 64))
    with pytest.raises(ValueError, match="code is NaN or infinite"):
        native.pack_weight(layout, 32, 64, codes, scale, packed)
