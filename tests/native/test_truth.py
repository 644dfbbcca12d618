"""Every level of the library equals the readable truth, bit for bit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.levels import at_level
from helpers.looped import each
from helpers.reference.kt_layout import pack_codes
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from native.support import (
    F32,
    ROWS,
    RULES,
    STORED,
    U8,
    Rule,
    Source,
    assert_same,
    every_rule,
    quantize_pack,
)

from ktconv import native
from ktconv.formats import FORMATS, output_formats
from ktconv.formats.decode import e4m3fn_to_f32, round_to_bf16

pytestmark = pytest.mark.slow

ALL_U16 = np.arange(65536, dtype=np.uint16)

every_level = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200
)


@st.composite
def sources(draw: st.DrawFn, formats: tuple[str, ...] = ("int8", "int4")) -> Source:
    fmt = FORMATS[draw(st.sampled_from(formats))]
    dtype = draw(st.sampled_from(list(STORED)))
    block, origin = (128, 128), (0, 0)
    if dtype == "F8_E4M3":
        side = st.sampled_from([1, 3, 16, 17, 32, 64, 100, 128, 1000])
        block, origin = (draw(side), draw(side)), (draw(st.integers(0, 300)), draw(side))
    rule, weighted = draw(st.sampled_from(RULES))
    return Source(
        fmt.key,
        rows=32 * draw(st.integers(1, 5)),
        cols=fmt.traits.col_multiple * draw(st.integers(1, 4)),
        dtype=dtype,
        transposed=draw(st.booleans()),
        pad=draw(st.sampled_from([0, 0, 1, 15, 64])),
        start=draw(st.integers(0, 70)),
        offset=draw(st.integers(0, 65)),
        rounded=draw(st.booleans()),
        block=block,
        origin=origin,
        seed=draw(st.integers(0, 2**32)),
        kinds=tuple(draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=4, unique=True))),
        rule=rule,
        weighted=weighted,
        factored=draw(st.booleans()),
    )


@lru_cache(maxsize=64)
def truth(source: Source) -> tuple[native.Matrix, F32, U8, F32]:
    """The matrix, its values, payload and scales: the same for every level."""
    values = source.values()
    packed, scale = reference.quantize_pack(source.fmt, values, source.reference_choice)
    return source.matrix(), values, packed, scale


def check(source: Source) -> None:
    matrix, values, expected_packed, expected_scale = truth(source)
    packed, scale = quantize_pack(source, matrix)
    assert_same("scale", scale, expected_scale)
    assert_same("packed", packed, expected_packed)
    codes, codes_scale = native.quantize(source.format, matrix, source.choice)
    assert_same("scale of quantize", codes_scale, scale)
    assert_same("pack(quantize)", native.pack(source.format, codes), packed)
    unpacked = native.unpack(source.format, packed, source.rows, source.cols)
    assert_same("unpack", unpacked, codes)
    assert_same("decode", native.decode(matrix), values)


@settings(every_level, max_examples=400)
@given(source=sources())
@example(Source("int8", 96, 64, dtype="F32", kinds=("tiny", "ordinary")))
@example(Source("int4", 160, 128, dtype="F32", rounded=True, offset=1))
@example(Source("int4", 32, 128, dtype="F8_E4M3", block=(7, 13), origin=(6, 12), transposed=True))
def test_quantize_pack(tiles: object, source: Source) -> None:
    """At every level."""
    for isa in native.isa_available():
        note(f"at {isa}")
        with at_level(isa):
            check(source)


@every_rule
@pytest.mark.parametrize(
    "source",
    [
        Source("int8", 96, 3584 + 64, "BF16", seed=1),
        Source("int8", 160, 7168 + 192, "F32", transposed=True, seed=2),
        Source("int4", 160, 3584 + 128, "F8_E4M3", block=(128, 96), origin=(100, 50), seed=3),
        Source("int4", 288, 7168, "BF16", transposed=True, pad=3, offset=1, seed=4),
        Source("int4", 192, 3584 + 256, "F16", rounded=True, seed=5),
    ],
    ids=lambda source: f"{source.format}-{source.dtype}-{source.rows}x{source.cols}",
)
@each("isa", native.isa_available())
def test_beyond_one_column_block(
    tiles: object, isa: str, source: Source, rule: Rule, weighted: bool
) -> None:
    with at_level(isa):
        check(source.but(rule=rule, weighted=weighted))


@every_rule
@pytest.mark.parametrize("fmt", output_formats())
@pytest.mark.parametrize("dtype", STORED)
def test_rows_do_not_depend_on_their_neighbours(
    tiles: object, fmt: str, dtype: str, rule: Rule, weighted: bool
) -> None:
    """One odd row among ordinary ones, at each place of a strip: the strip may take another
    path for it, with the same bits."""
    cols = FORMATS[fmt].traits.col_multiple
    source = Source(fmt, 32, cols, dtype, kinds=("ordinary",), rule=rule, weighted=weighted)
    for kind in ("tiny", "zeros", "denormals", "largest"):
        odd = source.but(rows=32, kinds=(kind,), seed=7).bits()
        bits = source.bits()
        for n in (0, 5, 15, 16, 31):
            mixed = bits.copy()
            mixed[n] = odd[n]
            values = source.values(mixed)
            expected = reference.quantize_pack(source.fmt, values, source.reference_choice)
            for isa in native.isa_available():
                with at_level(isa):
                    packed, scale = quantize_pack(source, source.matrix(mixed))
                assert_same(f"scale with {kind} in row {n} at {isa}", scale, expected[1])
                assert_same(f"packed with {kind} in row {n} at {isa}", packed, expected[0])


@pytest.mark.parametrize("fmt", output_formats())
def test_both_sides_of_every_decision(isa: str, fmt: str) -> None:
    """Values next to each point where a code changes, for maxima that round differently."""
    row = FORMATS[fmt]
    top = row.traits.max_level * row.traits.scale_units
    for amax in np.array([1.0, 1.625, 1.0078125, 112, 127, 2.0**-119, 1e30], np.float32):
        scale = reference.quantize(row, np.full((1, 1), amax))[1].astype(np.float64)
        points = (np.arange(-top + 0.5, top) * scale).astype(np.float32)
        near = points.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
        values = np.resize(near.view(np.float32), (32, row.traits.col_multiple * 10))
        values[:, -1] = amax
        buffer = values.reshape(-1).view(np.uint8)
        packed = np.empty(row.layout.weight_size(*values.shape), np.uint8)
        scales = np.empty(32, np.float32)
        native.quantize_pack(fmt, native.Matrix(buffer, "F32", *values.shape), packed, scales)
        expected = reference.quantize_pack(row, values)
        assert_same(f"scale at {amax}", scales, expected[1])
        assert_same(f"packed at {amax}", packed, expected[0])


# Packing alone


@pytest.mark.parametrize("fmt", output_formats())
@pytest.mark.parametrize("shape", [(32, 1), (96, 3), (224, 30)])
def test_pack_and_unpack_any_codes(isa: str, fmt: str, shape: tuple[int, int]) -> None:
    row = FORMATS[fmt]
    half = 1 << (row.traits.bits - 1)
    rows, cols = shape[0], shape[1] * row.traits.col_multiple
    codes = np.random.default_rng(3).integers(-half, half, (rows, cols), np.int8)
    packed = native.pack(fmt, codes)
    assert_same("packed", packed, pack_codes(row, codes))
    assert_same("unpacked", native.unpack(fmt, packed, rows, cols), codes)


# Decoding: every pattern


def decoded(buffer: U8, dtype: str, rows: int, cols: int, **more: object) -> F32:
    return native.decode(native.Matrix(buffer, dtype, rows, cols, **more))  # type: ignore[arg-type]


def assert_decoded(found: F32, expected: F32) -> None:
    """NaN for NaN with any payload, everything else bit for bit."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    assert_same("decode", found[~nan], expected[~nan])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_decode_every_half(isa: str, dtype: str, rounded: bool) -> None:
    bits = ALL_U16.reshape(16, 4096)
    expected = Source("int8", 16, 4096, dtype, rounded=rounded).values(bits)
    for buffer, strides in ((bits, {}), (bits.T, {"row_stride": 1, "col_stride": 16})):
        memory = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
        found = decoded(memory, dtype, 16, 4096, round_to_bf16=rounded, **strides)
        assert_decoded(found, expected)


@each("rounded", [False, True])
@each("scale", [1.0, 0.3, -2.0, 0.0, 1e-40, 1e-37, 3e36, np.inf, np.nan])
def test_decode_every_fp8(isa: str, scale: float, rounded: bool) -> None:
    codes = np.arange(256, dtype=np.uint8)
    grid = np.full((1, 1), scale, np.float32)
    with np.errstate(all="ignore"):
        values = e4m3fn_to_f32(codes) * grid[0]
    expected = round_to_bf16(values) if rounded else values
    found = decoded(
        codes, "F8_E4M3", 1, 256, block_scale=grid, block=(1, 256), round_to_bf16=rounded
    )
    assert_decoded(found[0], expected)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("cols", [1, 15, 16, 17, 4096])
def test_decode_f32_samples(isa: str, cols: int, rounded: bool) -> None:
    """Random bit patterns, with ties of the rounding to bf16 among them; ragged columns."""
    rng = np.random.default_rng(cols)
    bits = rng.integers(0, 1 << 32, (16, cols), np.uint32)
    bits[::2] = bits[::2] & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    expected = Source("int8", 16, cols, "F32", rounded=rounded).values(bits)
    found = decoded(bits.reshape(-1).view(np.uint8), "F32", 16, cols, round_to_bf16=rounded)
    assert_decoded(found, expected)
    flipped = np.ascontiguousarray(bits.T).reshape(-1).view(np.uint8)
    found = decoded(flipped, "F32", 16, cols, row_stride=1, col_stride=16, round_to_bf16=rounded)
    assert_decoded(found, expected)


@each("rounded", [False, True])
@each("scale", [1.0, -0.3, 0, 1e-40, 1.3e36, 1.4e36, np.inf, -np.inf, np.nan])
def test_fp8_has_the_same_bits_on_every_level(isa: str, scale: float, rounded: bool) -> None:
    """Also those of its NaNs; only which of two NaNs a product is, is up to the compiler."""
    codes = np.arange(256, dtype=np.uint8)
    if np.isnan(scale):
        codes[[0x7F, 0xFF]] = 0
    grid = np.full((1, 1), scale, np.float32)

    def bits(rows: int, **strides: int) -> F32:
        cols = 256 // rows
        options: Any = {"block_scale": grid, "block": (rows, cols), "round_to_bf16": rounded}
        return decoded(codes, "F8_E4M3", rows, cols, **options, **strides)

    found = [bits(1), bits(16), bits(16, row_stride=1, col_stride=16)]
    native.use_isa("scalar")  # the fixture restores the level
    expected = [bits(1), bits(16), bits(16, row_stride=1, col_stride=16)]
    for ours, scalar in zip(found, expected, strict=True):
        assert_same("bits", ours, scalar)
