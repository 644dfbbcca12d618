"""kt_audit_run and kt_audit_codes against the readable reference, on every level."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native.support import F32, STORED, U8, Source, assert_same, quantize_pack

from ktconv import native
from ktconv.formats import FORMATS, int4, int8
from ktconv.formats.kt_layout import pack_codes, unpack_codes

formats = pytest.mark.parametrize("fmt", FORMATS)


def restored(source: Source, packed: U8, scale: F32) -> F32:
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    step: F32 = scale * np.float32(source.fmt.scale_units)
    values: F32 = codes * step[:, None]
    return values


def assert_audit(source: Source, packed: U8, scale: F32) -> native.Audit:
    """Maxima to the bit, sums within what binary32 squares allow."""
    found = native.audit(source.format, source.matrix(), source.rows, 0, packed, scale)
    values, got = source.values(), restored(source, packed, scale)
    with np.errstate(over="ignore"):
        off = np.abs(values - got)
    assert_same("row_error", found.row_error, off.max(axis=1))
    assert_same("row_amax", found.row_amax, np.abs(values).max(axis=1))
    rule = (int4 if source.format == "int4" else int8).scale_of(np.abs(values).max(axis=1))
    assert_same("row_scale", found.row_scale, rule)
    exact = values.astype(np.float64), got.astype(np.float64)
    sums = (exact[0] ** 2).sum(), ((exact[0] - exact[1]) ** 2).sum(), (exact[1] ** 2).sum()
    mine = found.squared_source, found.squared_error, found.squared_value
    for one, other in zip(mine, sums, strict=True):
        assert math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12 * sums[0])
    step = scale.astype(np.float64) * source.fmt.scale_units
    with np.errstate(all="ignore"):
        steps = np.where(step > 0, off.max(axis=1) / step, 0)
    assert found.max_steps == steps.max()
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    assert found.zeros == int((codes == 0).sum())
    assert found.invalid == int((np.abs(codes.astype(int)) > source.fmt.max_level).sum())
    return found


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
@given(
    fmt=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(list(STORED)),
    strips=st.integers(1, 5),
    tiles=st.integers(1, 4),
    transposed=st.booleans(),
    rounded=st.booleans(),
    block=st.sampled_from([(128, 128), (48, 80), (1, 64), (5, 7)]),
    origin=st.sampled_from([(0, 0), (64, 128), (3, 50)]),
    seed=st.integers(0, 2**32),
    kinds=st.sampled_from([("ordinary",), ("ordinary", "zeros"), ("tiny",), Source.kinds]),
)
def test_sound_payload(
    isa: str,
    fmt: str,
    dtype: str,
    strips: int,
    tiles: int,
    transposed: bool,
    rounded: bool,
    block: tuple[int, int],
    origin: tuple[int, int],
    seed: int,
    kinds: tuple[str, ...],
) -> None:
    source = Source(
        fmt,
        32 * strips,
        FORMATS[fmt].k_tile * tiles,
        dtype,
        transposed=transposed,
        rounded=rounded,
        block=block,
        origin=origin,
        seed=seed,
        kinds=kinds,
    )
    packed, scale = quantize_pack(source, source.matrix())
    assert_audit(source, packed, scale)


@formats
@pytest.mark.parametrize("rows", [32, 96, 160, 288])
def test_every_block(isa: str, fmt: str, rows: int) -> None:
    """Several row blocks, a last one that is not full, and columns beyond a column block."""
    source = Source(fmt, rows, 3584 + 256, kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    assert_audit(source, packed, scale)


@formats
def test_any_codes(isa: str, fmt: str) -> None:
    """Also those that no packer writes."""
    source = Source(fmt, 64, 256, kinds=("ordinary",))
    bits = source.fmt.bits - 1
    rng = np.random.default_rng(1)
    codes = rng.integers(-(1 << bits), 1 << bits, (64, 256)).astype(np.int8)
    scale = rng.uniform(0.01, 1, 64).astype(np.float32)
    found = assert_audit(source, pack_codes(source.fmt, codes), scale)
    assert found.invalid > 0


@formats
def test_rows_in_pieces(isa: str, fmt: str) -> None:
    """Chunks of rows find what all rows at once find."""
    source = Source(fmt, 192, 256, kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    whole = native.audit(fmt, source.matrix(), 192, 0, packed, scale)
    bits, errors = source.bits(), []
    for first, count in ((0, 64), (64, 32), (96, 96)):
        piece = native.Matrix(
            bits[first : first + count].reshape(-1).view(np.uint8), "BF16", count, 256
        )
        errors.append(native.audit(fmt, piece, 192, first, packed, scale).row_error)
    assert_same("row_error", np.concatenate(errors), whole.row_error)


@formats
def test_levels_agree_to_the_bit(fmt: str) -> None:
    source = Source(fmt, 96, 512)
    packed, scale = quantize_pack(source, source.matrix())
    before, found = native.isa(), []
    try:
        for level in native.isa_available():
            native.use_isa(level)
            one = native.audit(fmt, source.matrix(), 96, 0, packed, scale)
            found.append((one.squared_source, one.squared_error, one.squared_value, one.zeros))
    finally:
        native.use_isa(before)
    assert len(set(found)) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_source(isa: str, value: float) -> None:
    source = Source("int8", 32, 64, "F32", kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    bits = source.bits()
    bits[7, 9] = np.float32(value).view(np.uint32)
    found = native.audit("int8", source.matrix(bits), 32, 0, packed, scale)
    assert not math.isfinite(found.squared_source)


@formats
@pytest.mark.parametrize("shape", [(32, 128), (96, 640), (160, 3584 + 128), (256, 7168)])
def test_codes(isa: str, fmt: str, shape: tuple[int, int]) -> None:
    packed = np.random.default_rng(3).integers(
        0, 256, native.packed_size(fmt, *shape), dtype=np.uint8
    )
    expected = unpack_codes(FORMATS[fmt], packed, *shape)
    assert_same("codes", native.audit_codes(fmt, packed, *shape), expected)


def test_refusals() -> None:
    source = Source("int8", 64, 64, kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    for first, rows in ((16, 64), (-32, 64), (32, 64), (0, 32)):
        with pytest.raises(ValueError):
            native.audit("int8", source.matrix(), rows, first, packed, scale)
    with pytest.raises(ValueError):
        native.audit("int8", source.matrix(), 64, 0, packed[:-1], scale)
    with pytest.raises(ValueError):
        native.audit("int8", source.matrix(), 64, 0, packed, scale[:-1])
    with pytest.raises(ValueError):
        native.audit_codes("int8", packed[:-1], 64, 64)
    with pytest.raises(ValueError):
        native.audit_codes("int4", packed, 64, 64)
