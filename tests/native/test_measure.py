"""kt_measure against a NumPy computation, and the faults that it must see."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native.support import F32, STORED, U8, Source, quantize_pack

from ktconv import native
from ktconv.formats import FORMATS, SMALLEST_NORMAL
from ktconv.formats.kt_layout import offsets, unpack_codes

formats = pytest.mark.parametrize("fmt", FORMATS)


def expected_sums(source: Source, packed: U8, scale: F32) -> native.ErrorSums:
    """The definition of kt_error for a payload without faults."""
    values = source.values().astype(np.float64)
    values[np.abs(values) < SMALLEST_NORMAL] = 0
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    step = scale.astype(np.float64) * source.fmt.scale_units
    error = np.abs(values - codes * step[:, None])
    steps = error[step > 0] / step[step > 0, None]
    return native.ErrorSums(
        squared_error=float((error**2).sum()),
        squared_source=float((values**2).sum()),
        max_steps=float(steps.max(initial=0)),
        zeros=int((codes == 0).sum()),
        elements=source.rows * source.cols,
    )


def squared_error_bound(source: Source, scale: F32) -> float:
    """How far binary32 arithmetic may be from the definition.

    Errors come from y = x/step in two roundings, |y| <= 127, so they are off by less than
    2^-16 steps; they stay below 0.54 steps, so squares are off by less than 2^-15. A sum
    of cols/16 terms is off by 2^-24 of itself for each term.
    """
    steps = (scale.astype(np.float64) * source.fmt.scale_units) ** 2
    return float(steps.sum()) * source.cols * (2.0**-15 + relative_bound(source))


def relative_bound(source: Source) -> float:
    return (source.cols / 16 + 16) * 2.0**-23


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
@given(
    fmt=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(list(STORED)),
    tiles=st.integers(1, 4),
    transposed=st.booleans(),
    rounded=st.booleans(),
    seed=st.integers(0, 2**32),
    kinds=st.sampled_from([("ordinary",), ("ordinary", "zeros"), ("tiny",), Source.kinds]),
)
def test_sums(
    isa: str,
    fmt: str,
    dtype: str,
    tiles: int,
    transposed: bool,
    rounded: bool,
    seed: int,
    kinds: tuple[str, ...],
) -> None:
    source = Source(
        fmt,
        64,
        FORMATS[fmt].k_tile * tiles,
        dtype,
        transposed=transposed,
        rounded=rounded,
        seed=seed,
        kinds=kinds,
    )
    matrix = source.matrix()
    packed, scale = quantize_pack(source, matrix)
    found = native.measure(fmt, matrix, packed, scale)
    expected = expected_sums(source, packed, scale)
    assert found.zeros == expected.zeros
    assert found.invalid == 0
    assert found.elements == expected.elements
    bound = squared_error_bound(source, scale) + 1e-12 * expected.squared_error  # binary64 order
    assert abs(found.squared_error - expected.squared_error) <= bound
    assert math.isclose(
        found.squared_source, expected.squared_source, rel_tol=relative_bound(source)
    )
    assert abs(found.max_steps - expected.max_steps) <= 2.0**-15
    assert found.max_steps <= source.fmt.max_error_steps
    assert (found.worst_row == -1) == (found.max_steps == 0)


@formats
def test_wide(isa: str, fmt: str) -> None:
    source = Source(fmt, 160, 3584 + 256, kinds=("ordinary", "int4 ties"))
    matrix = source.matrix()
    packed, scale = quantize_pack(source, matrix)
    found, expected = (
        native.measure(fmt, matrix, packed, scale),
        expected_sums(source, packed, scale),
    )
    assert math.isclose(found.squared_error, expected.squared_error, rel_tol=1e-4)
    assert found.zeros == expected.zeros
    assert math.isclose(found.relative_rms, expected.relative_rms, rel_tol=1e-4)


# Faults


def planted(fmt: str) -> tuple[Source, native.Matrix, U8, F32]:
    source = Source(fmt, 64, 2 * FORMATS[fmt].k_tile, kinds=("ordinary",), seed=5)
    matrix = source.matrix()
    return source, matrix, *quantize_pack(source, matrix)


def set_code(source: Source, packed: U8, n: int, k: int, code: int) -> None:
    byte, plane = offsets(source.fmt, np.array(n), np.array(k), source.rows, source.cols)
    mask = (1 << source.fmt.bits) - 1
    shift = source.fmt.bits * int(plane)
    rest = int(packed[byte]) & ~(mask << shift)
    packed[byte] = rest & 0xFF | (code & mask) << shift


@formats
def test_a_flipped_bit_shows(isa: str, fmt: str) -> None:
    """A code that is off by one or more is off by 1 - max_error_steps or more, and beyond
    the bound unless the source was near the middle of two codes."""
    source, matrix, packed, scale = planted(fmt)
    values = source.values().astype(np.float64)
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    step = scale.astype(np.float64)[:, None] * source.fmt.scale_units
    near_the_middle = np.abs(values / step - codes) > 0.4
    rng = np.random.default_rng(2)
    for n, k in rng.permutation(np.argwhere(~near_the_middle))[:40]:
        byte, plane = offsets(source.fmt, n, k, source.rows, source.cols)
        damaged = packed.copy()
        damaged[byte] ^= 1 << (source.fmt.bits * int(plane) + int(rng.integers(source.fmt.bits)))
        found = native.measure(fmt, matrix, damaged, scale)
        assert found.max_steps > source.fmt.max_error_steps
        assert found.worst_row == n


@formats
def test_the_unused_lowest_level_is_invalid(isa: str, fmt: str) -> None:
    source, matrix, packed, scale = planted(fmt)
    for count, (n, k) in enumerate([(0, 0), (17, 63), (63, source.cols - 1)], start=1):
        set_code(source, packed, n, k, -(1 << (source.fmt.bits - 1)))
        assert native.measure(fmt, matrix, packed, scale).invalid == count


@formats
@pytest.mark.parametrize("bad", [-1.0, -1e-30, np.nan, np.inf, -np.inf, 1e-40])
def test_an_impossible_scale_is_invalid(isa: str, fmt: str, bad: float) -> None:
    source, matrix, packed, scale = planted(fmt)
    scale[19] = bad
    found = native.measure(fmt, matrix, packed, scale)
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    worthless = 0 if bad > 0 else np.count_nonzero(codes[19])
    assert found.invalid == 1 + worthless
    assert found.zeros == np.count_nonzero(codes == 0)


@formats
@pytest.mark.parametrize("factor", [0.5, 0.99, 1.01, 2.0, 1e30, 1e-30])
def test_a_wrong_scale_shows(isa: str, fmt: str, factor: float) -> None:
    source, matrix, packed, scale = planted(fmt)
    scale[40] *= np.float32(factor)
    limit = source.fmt.max_error_steps
    found = native.measure(fmt, matrix, packed, scale)
    if fmt == "int8" or not 0.98 < factor < 1.02:  # 1 % of 7 steps is within INT4's half
        assert found.max_steps > limit
        assert found.worst_row == 40


@formats
def test_a_code_under_a_zero_scale_is_invalid(isa: str, fmt: str) -> None:
    source = Source(fmt, 32, FORMATS[fmt].k_tile, kinds=("zeros",))
    matrix = source.matrix()
    packed, scale = quantize_pack(source, matrix)
    assert not packed.any()
    assert native.measure(fmt, matrix, packed, scale).invalid == 0
    set_code(source, packed, 3, 5, 1)
    set_code(source, packed, 3, 6, -2)
    assert native.measure(fmt, matrix, packed, scale).invalid == 2


@formats
def test_erased_rows_show(isa: str, fmt: str) -> None:
    """Zeroed payload under zeroed scales, as a hole in a file reads."""
    source, matrix, packed, scale = planted(fmt)
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    for n in (0, 33):
        scale[n] = 0
        for k in np.flatnonzero(codes[n]):
            set_code(source, packed, n, int(k), 0)
    found = native.measure(fmt, matrix, packed, scale)
    assert found.invalid == 2
    values = source.values().astype(np.float64)
    assert found.squared_error >= (values[[0, 33]] ** 2).sum()


@formats
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nonfinite_source_is_no_match(isa: str, fmt: str, bad: float) -> None:
    source, _, packed, scale = planted(fmt)
    values = source.values().copy()
    values[9, 9] = bad
    damaged = native.Matrix(values.reshape(-1).view(np.uint8), "F32", *values.shape)
    assert not math.isfinite(native.measure(fmt, damaged, packed, scale).squared_error)


@formats
def test_measure_reads_and_does_not_write(isa: str, fmt: str) -> None:
    _, matrix, packed, scale = planted(fmt)
    packed.flags.writeable = scale.flags.writeable = False
    native.measure(fmt, matrix, packed, scale)
    with pytest.raises(ValueError, match="read-only"):
        native.quantize_pack(fmt, matrix, packed, scale)


def test_sums_add() -> None:
    a = native.ErrorSums(1.0, 4.0, 0.5, 2, 0, 3, 10)
    b = native.ErrorSums(3.0, 12.0, 0.25, 1, 1, 9, 30)
    both = a.add(b)
    assert both == native.ErrorSums(4.0, 16.0, 0.5, 3, 1, 3, 40)
    assert b.add(a).worst_row == 3
    assert both.relative_rms == 0.5
    assert both.zero_share == 3 / 40
    assert native.ErrorSums().relative_rms == native.ErrorSums().zero_share == 0.0
