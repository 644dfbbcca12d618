"""kt_audit_run and kt_audit_codes of GINT4 and GINT8 against docs/formats.md 8.4 and 8.5 in numpy,
on every level, and the faults that they must show."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import reference
from helpers.levels import at_level
from helpers.looped import each
from msgspec.structs import replace
from native.support import F32, STORED, U8, Rule, Source, assert_same, every_rule
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Layout

pytestmark = pytest.mark.slow

Array = NDArray[Any]
LAYOUTS = [Layout("gint4", group, scale) for group in (32, 64, 128) for scale in ("bf16", "f32")]
LAYOUTS += [Layout("gint8", 32, "f32"), Layout("gint8", 64, "bf16"), Layout("gint8", 128, "bf16")]
layouts = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.format}-{layout.group}-{layout.scale_dtype}"
)
ROUNDED = 0.5 + 2.0**-14  # steps; a bf16 scale is up to 2^-9 smaller than amax / 7 or / 127


def top_of(layout: Layout) -> int:
    return 7 if layout.format == "gint4" else 127


def code_places(layout: Layout, rows: int, cols: int) -> tuple[Array, Array]:
    """The byte of each element, and by how much its nibble is shifted."""
    n, k = np.ogrid[:rows, :cols]
    if layout.format == "gint8":
        tile = (n // 32 * (cols // 32) + k // 32) * 1024
        byte = tile + k % 32 // 4 * 128 + n % 32 // 16 * 64 + n % 16 * 4 + k % 4
        return byte, np.zeros_like(byte)
    tile = (n // 32 * (cols // 32) + k // 32) * 512
    byte = tile + k % 32 // 4 * 64 + n % 16 * 4 + k % 4
    return byte, np.broadcast_to(n % 32 // 16 * 4, byte.shape)


def scale_places(layout: Layout, rows: int, cols: int) -> Array:
    """The index of the scale of each row and group."""
    n, g = np.ogrid[:rows, : cols // layout.group]
    places: Array = (n // 32 * (cols // layout.group) + g) * 32 + n % 32
    return places


def codes_of(layout: Layout, packed: U8, rows: int, cols: int) -> NDArray[np.int8]:
    byte, shift = code_places(layout, rows, cols)
    if layout.format == "gint8":
        return (packed[byte].astype(np.int16) - 128).astype(np.int8)
    return ((packed[byte] >> shift & 15).astype(np.int8) - 8).astype(np.int8)


def scales_of(layout: Layout, scale: U8, rows: int, cols: int) -> F32:
    stored = scale.view(layout.scale_array)[scale_places(layout, rows, cols)]
    return bf16_to_f32(stored) if layout.scale_dtype == "bf16" else stored


def quantized(layout: Layout, source: Source) -> tuple[U8, U8]:
    packed = np.full(layout.weight_size(source.rows, source.cols), 0x5A, np.uint8)
    scale = np.full(layout.scale_size(source.rows, source.cols), 0x5A, np.uint8)
    native.quantize_pack(layout, source.matrix(), packed, scale, choice=source.choice)
    return packed, scale


@lru_cache(maxsize=1024)
def rule_scale(layout: Layout, source: Source) -> F32:
    """What the source's rule gives for each group [rows, groups]; the same for every level."""
    if source.rule != "amax":
        fmt = replace(
            FORMATS[f"{layout.format}-32"], group=layout.group, scale_dtype=layout.scale_dtype
        )
        found: Any = reference.quantize(fmt, source.values(), source.reference_choice)[1]
        return bf16_to_f32(found) if layout.scale_dtype == "bf16" else found
    amax = np.abs(source.values()).reshape(source.rows, -1, layout.group).max(axis=2)
    scale = (amax.astype(np.float64) / 7).astype(np.float32)
    if layout.format == "gint8":
        scale = amax * np.float32(1 / 127)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    return bf16_to_f32(f32_to_bf16(scale)) if layout.scale_dtype == "bf16" else scale


def audited(layout: Layout, source: Source, packed: U8, scale: U8) -> native.Audit:
    matrix, choice = source.matrix(), source.choice
    return native.audit(layout, matrix, source.rows, 0, packed, scale, choice)


class Truth(NamedTuple):
    """What an audit finds; arrays are [rows, groups]."""

    error: F32
    amax: F32
    sums: tuple[float, float, float]  # of squares: of the source, of errors, of values
    max_steps: float
    zeros: int
    invalid: int


@lru_cache(maxsize=2)  # for all levels, one after the other
def truth(layout: Layout, source: Source, packed: bytes, scale: bytes) -> Truth:
    rows, cols = source.rows, source.cols
    codes, values = codes_of(layout, np.frombuffer(packed, np.uint8), rows, cols), source.values()
    step = scales_of(layout, np.frombuffer(scale, np.uint8), rows, cols)
    got = codes * np.repeat(step, layout.group, axis=1)
    grouped = (rows, -1, layout.group)
    cut = values
    if source.rule != "amax":
        top = np.repeat(np.float32(top_of(layout)) * step, layout.group, axis=1)
        cut = np.where((top > 0) & (np.abs(values) > top), np.copysign(top, values), values)
    error = np.abs(cut - got).reshape(grouped).max(axis=2)
    exact = values.astype(np.float64), got.astype(np.float64)
    with np.errstate(all="ignore"):
        steps = np.where(step > 0, error / step.astype(np.float64), 0)
    dead = np.repeat(step == 0, layout.group, axis=1)
    return Truth(
        error,
        np.abs(values).reshape(grouped).max(axis=2),
        ((exact[0] ** 2).sum(), ((exact[0] - exact[1]) ** 2).sum(), (exact[1] ** 2).sum()),
        steps.max(),
        int((codes == 0).sum()),
        int((codes[dead] != 0).sum()),
    )


def assert_audit(layout: Layout, source: Source, packed: U8, scale: U8) -> native.Audit:
    """Maxima to the bit, sums within what binary32 squares allow."""
    found = audited(layout, source, packed, scale)
    right = truth(layout, source, packed.tobytes(), scale.tobytes())
    assert_same("row_error", found.row_error, right.error)
    assert_same("row_amax", found.row_amax, right.amax)
    assert_same("row_scale", found.row_scale, rule_scale(layout, source))
    mine = found.squared_source, found.squared_error, found.squared_value
    for one, other in zip(mine, right.sums, strict=True):
        assert math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12 * right.sums[0])
    assert found.max_steps == right.max_steps
    assert (found.zeros, found.invalid) == (right.zeros, right.invalid)
    return found


@layouts
@every_rule
@each("dtype", STORED)
@each("transposed, rounded", [(False, True), (True, False)])
def test_sound_weights(
    tiles: object,
    layout: Layout,
    dtype: str,
    transposed: bool,
    rounded: bool,
    rule: Rule,
    weighted: bool,
) -> None:
    for rows, groups in ((32, 1), (96, 3), (64, 8))[: 3 if rule == "amax" else 2]:
        source = Source(
            "int4",
            rows,
            groups * layout.group,
            dtype,
            transposed=transposed,
            rounded=rounded,
            block=(48, 80),
            origin=(3, 50),
            seed=groups,
            rule=rule,
            weighted=weighted,
            factored=rounded,
        )
        for isa in native.isa_available():
            with at_level(isa):
                found = assert_audit(layout, source, *quantized(layout, source))
            assert found.invalid == 0, isa


@layouts
def test_any_bytes(isa: str, layout: Layout) -> None:
    """Also codes of -8 or -128, which other quantizers choose, and any scales."""
    source = Source("int4", 64, 384, kinds=("ordinary",))
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, layout.weight_size(64, 384), dtype=np.uint8)
    assert (codes_of(layout, packed, 64, 384) == -top_of(layout) - 1).any()
    scale = rng.uniform(0.01, 1, layout.scale_size(64, 384) // layout.scale_array.itemsize)
    stored = scale.astype(np.float32)
    stored[rng.random(stored.size) < 0.2] = 0
    given = f32_to_bf16(stored) if layout.scale_dtype == "bf16" else stored
    assert assert_audit(layout, source, packed, given.view(np.uint8)).invalid > 0
    assert_same(
        "codes", native.audit_codes(layout, packed, 64, 384), codes_of(layout, packed, 64, 384)
    )


@layouts
@every_rule
def test_levels_agree_to_the_bit(layout: Layout, rule: Rule, weighted: bool) -> None:
    source = Source("int4", 96, 640, rule=rule, weighted=weighted)
    packed, scale = quantized(layout, source)
    found = []
    for level in native.isa_available():
        with at_level(level):
            one = audited(layout, source, packed, scale)
            sums = one.squared_source, one.squared_error, one.squared_value, one.max_steps
            found.append((sums, one.row_error.tobytes(), one.row_scale.tobytes()))
    assert len(set(found)) == 1


@layouts
def test_rows_in_pieces(isa: str, layout: Layout) -> None:
    source = Source("int4", 192, 256, kinds=("ordinary",))
    packed, scale = quantized(layout, source)
    whole, errors = audited(layout, source, packed, scale), []
    for first, count in ((0, 64), (64, 32), (96, 96)):
        bits = source.bits()[first : first + count].reshape(-1).view(np.uint8)
        piece = native.Matrix(bits, "BF16", count, 256)
        errors.append(native.audit(layout, piece, 192, first, packed, scale).row_error)
    assert_same("row_error", np.concatenate(errors), whole.row_error)


# Faults


def planted(layout: Layout) -> tuple[Source, U8, U8]:
    source = Source("int4", 64, 256, kinds=("ordinary",), seed=5)
    packed, scale = quantized(layout, source)
    assert assert_audit(layout, source, packed, scale).max_steps <= ROUNDED
    return source, packed, scale


def groups_beyond(layout: Layout, source: Source, packed: U8, scale: U8) -> list[tuple[int, int]]:
    """Rows and groups with an error that no rounding makes."""
    found = audited(layout, source, packed, scale)
    step = scales_of(layout, scale, source.rows, source.cols).astype(np.float64)
    return [(int(n), int(g)) for n, g in np.argwhere(~(found.row_error <= ROUNDED * step))]


def groups_off_the_rule(layout: Layout, source: Source, packed: U8, scale: U8) -> list[Any]:
    found = audited(layout, source, packed, scale)
    stored = scales_of(layout, scale, source.rows, source.cols)
    return [(int(n), int(g)) for n, g in np.argwhere(found.row_scale != stored)]


@layouts
def test_a_flipped_bit_shows(isa: str, layout: Layout) -> None:
    source, packed, scale = planted(layout)
    byte, shift = code_places(layout, 64, 256)
    step = np.repeat(scales_of(layout, scale, 64, 256).astype(np.float64), layout.group, axis=1)
    near_the_middle = np.abs(source.values() / step - codes_of(layout, packed, 64, 256)) > 0.4
    rng = np.random.default_rng(2)
    for n, k in rng.permutation(np.argwhere(~near_the_middle))[:40]:
        damaged = packed.copy()
        bits = 4 if layout.format == "gint4" else 8
        damaged[byte[n, k]] ^= 1 << int(shift[n, k] + rng.integers(bits))
        assert groups_beyond(layout, source, damaged, scale) == [(n, k // layout.group)]
        assert audited(layout, source, damaged, scale).max_steps > ROUNDED


@layouts
@each("factor", [0.5, 2.0, -1.0, 1e30, math.nan, math.inf])
def test_a_wrong_scale_shows(isa: str, layout: Layout, factor: float) -> None:
    source, packed, scale = planted(layout)
    group = 256 // layout.group - 1
    at = scale_places(layout, 64, 256)[40, group]
    stored = scale.view(layout.scale_array)
    wrong = scales_of(layout, scale, 64, 256)[40, group] * np.float32(factor)
    stored[at] = f32_to_bf16(np.array([wrong]))[0] if layout.scale_dtype == "bf16" else wrong
    assert groups_off_the_rule(layout, source, packed, scale) == [(40, group)]
    if factor in (0.5, -1.0):
        assert groups_beyond(layout, source, packed, scale) == [(40, group)]


@layouts
def test_padding_that_is_not_zero_shows(isa: str, layout: Layout) -> None:
    """Rows of zeros have scales of 0, under which no code changes a value."""
    source = Source("int4", 32, 256, kinds=("zeros",))
    packed, scale = quantized(layout, source)
    zero, near = (0x88, (0x89, 0x08)) if layout.format == "gint4" else (128, (129, 0))
    assert not scale.any() and (packed == zero).all()
    assert assert_audit(layout, source, packed, scale).invalid == 0
    packed[[17, 700]] = near
    found = audited(layout, source, packed, scale)
    assert (found.invalid, found.zeros) == (2, 32 * 256 - 2)
    assert not found.row_error.any() and not found.row_scale.any()


@layouts
def test_a_nan_in_the_source(isa: str, layout: Layout) -> None:
    source = Source("int4", 32, 128, "F32", kinds=("ordinary",))
    packed, scale = quantized(layout, source)
    bits = source.bits()
    bits[7, 9] = np.float32(np.nan).view(np.uint32)
    found = native.audit(layout, source.matrix(bits), 32, 0, packed, scale)
    assert not math.isfinite(found.squared_source) and not math.isfinite(found.squared_error)


def test_what_the_audit_of_groups_refuses() -> None:
    layout = Layout("gint4", 64, "bf16")
    source = Source("int4", 64, 128, kinds=("ordinary",))
    packed, scale = quantized(layout, source)
    for first, rows in ((16, 64), (-32, 64), (32, 64), (0, 32)):
        with pytest.raises(ValueError):
            native.audit(layout, source.matrix(), rows, first, packed, scale)
    with pytest.raises(ValueError):
        native.audit(layout, source.matrix(), 64, 0, packed, scale[:-2])
    with pytest.raises(ValueError, match=r"does not allow a matrix of \[64, 96\]"):
        native.audit_codes(layout, packed, 64, 96)
