"""Scales and codes: the worked examples of SPEC 3, and the error bounds by search."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.reference import dequantize, quantize
from helpers.reference.integers import second_rounding
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from ktconv.formats import INT4, INT8, SMALLEST_NORMAL, Format, output_formats, scales
from ktconv.formats.decode import bf16_to_f32
from ktconv.formats.integers import RECIPROCAL_OF_127, scale_of

F32 = NDArray[np.float32]

FLT_MAX = float(np.finfo(np.float32).max)
both_formats = pytest.mark.parametrize("fmt", output_formats().values(), ids=lambda fmt: fmt.key)


def row(*values: float) -> F32:
    return np.array([values], np.float32)


def from_bits(*bits: int) -> F32:
    return bf16_to_f32(np.array([bits], np.uint16))


def bits_of(scale: F32) -> list[int]:
    return [int(b) for b in scale.view(np.uint32)]


def check_bounds(fmt: Format, matrix: F32) -> None:
    """Every element of `matrix` is restored as nearly as the format's bounds say."""
    codes, scale = quantize(fmt, matrix)
    assert int(np.abs(codes.astype(int)).max(initial=0)) <= fmt.traits.max_level
    restored = dequantize(fmt, codes, scale).astype(np.float64)
    error = np.abs(matrix.astype(np.float64) - restored)
    bound = scales.error_bound(fmt, scale)
    worst = (error / bound[:, None]).max(initial=0.0)
    assert worst <= 1.0, f"{worst} of the bound; scales {scale}"
    assert not restored[scale == 0].any()


# The examples of SPEC 3.2


def test_reciprocal_constant() -> None:
    assert bits_of(np.array([RECIPROCAL_OF_127])) == [0x3C010204]


@pytest.mark.parametrize(
    ("fmt", "amax", "scale"),
    [
        (INT8, 1.625, 0x3C51A346),
        (INT8, 1.0, 0x3C010204),
        (INT8, 127.0, 0x3F800000),
        (INT4, 1.0, 0x3C124925),
        (INT4, 112.0, 0x3F800000),
    ],
)
def test_scale_examples(fmt: Format, amax: float, scale: int) -> None:
    assert bits_of(quantize(fmt, row(0.0, -amax))[1]) == [scale]


def test_int8_scale_is_no_division() -> None:
    amax = from_bits(*range(0x3F80, 0x4000))[0]
    divided = amax / np.float32(127)
    assert np.flatnonzero(scale_of(INT8, amax) != divided).tolist() == [
        15,
        16,
        47,
        79,
        80,
        111,
    ]


def test_int4_scale_is_a_division_and_no_reciprocal() -> None:
    amax = from_bits(*range(0x03E0, 0x7F80))[0]
    scale = scale_of(INT4, amax)
    assert np.array_equal(scale, amax / np.float32(112))
    assert (scale != amax * (np.float32(1) / np.float32(112))).any()


@both_formats
def test_flush_limit(fmt: Format) -> None:
    limit = {"int8": 0x03FE, "int4": 0x03E0}[fmt.key]
    at, below = from_bits(limit), from_bits(limit - 1)
    assert at[0, 0] == fmt.smallest_amax
    assert quantize(fmt, at)[1][0] == SMALLEST_NORMAL
    assert bits_of(quantize(fmt, below)[1]) == [0]
    just_below = np.nextafter(at, np.float32(0))
    assert bits_of(quantize(fmt, just_below)[1]) == [0]
    assert not quantize(fmt, just_below)[0].any()


# SPEC 3.3 to 3.5


@pytest.mark.parametrize(
    ("y", "code"),
    [(7.5, 1), (7.49, 0), (23.5, 2), (-7.5, -1), (-7.49, 0), (6.5, 0), (8.5, 1), (112.0, 7)],
)
def test_int4_rounds_twice(y: float, code: int) -> None:
    codes, scale = quantize(INT4, row(112.0, y))
    assert scale[0] == 1.0
    assert codes.tolist() == [[7, code]]


@pytest.mark.parametrize(
    ("y", "code"),
    [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (126.5, 126), (-127.0, -127)],
)
def test_int8_ties_go_to_even(y: float, code: int) -> None:
    codes, scale = quantize(INT8, row(127.0, y))
    assert scale[0] == 1.0
    assert codes.tolist() == [[127, code]]


def test_second_rounding_of_every_byte() -> None:
    q = np.arange(-128, 128, dtype=np.int32)
    expected = [int(np.sign(v)) * ((abs(int(v)) + 8) // 16) for v in q]
    assert second_rounding(q).tolist() == expected


@both_formats
def test_zero_and_denormal_rows(fmt: Format) -> None:
    matrix = np.array([[0.0, -0.0], [1e-40, -1e-39], [0.0, -1e-38]], np.float32)
    codes, scale = quantize(fmt, matrix)
    assert bits_of(scale) == [0, 0, 0]
    assert not codes.any()


@both_formats
def test_denormal_elements_become_zero(fmt: Format) -> None:
    below = float(np.nextafter(np.float32(SMALLEST_NORMAL), np.float32(0)))
    codes, _ = quantize(fmt, row(fmt.smallest_amax, below, SMALLEST_NORMAL))
    assert codes[0, 1] == 0
    assert codes[0, 2] == (1 if fmt is INT8 else 0)


@both_formats
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_is_refused(fmt: Format, bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or Inf"):
        quantize(fmt, row(1.0, bad))


@both_formats
def test_other_dtypes_are_refused(fmt: Format) -> None:
    with pytest.raises(TypeError, match="float64"):
        quantize(fmt, np.zeros((1, 1)))  # type: ignore[arg-type]


# Bounds


@both_formats
@pytest.mark.parametrize("first", [0x0380, 0x0400, 0x0480, 0x1000, 0x3F80, 0x7F00])
def test_bounds_at_every_decision(fmt: Format, first: int) -> None:
    """Both sides of every point where q changes, for all bf16 maxima of one octave."""
    halves = np.arange(0.5, fmt.traits.max_level * fmt.traits.scale_units)
    for amax in from_bits(*range(first, first + 128))[0]:
        scale = quantize(fmt, row(amax))[1]
        points = (halves * scale.astype(np.float64)).astype(np.float32)
        points = points[points > SMALLEST_NORMAL / 2]
        around = points.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
        values = around.view(np.float32).ravel()
        check_bounds(fmt, np.concatenate([values, -values, [amax]])[None, :])


@pytest.mark.parametrize(("fmt", "needed"), [(INT8, 0.5), (INT4, 0.5 + 2.0**-5)])
def test_bounds_are_nearly_reached(fmt: Format, needed: float) -> None:
    y = {"int8": 126.5, "int4": 103.5}[fmt.key]
    matrix = row(fmt.traits.max_level * fmt.traits.scale_units, y)
    codes, scale = quantize(fmt, matrix)
    error = abs(y - float(dequantize(fmt, codes, scale)[0, 1])) / (
        fmt.traits.scale_units * float(scale[0])
    )
    assert error == needed
    assert needed <= fmt.max_error_steps <= needed + 2.0**-15


@both_formats
def test_largest_floats_do_not_overflow(fmt: Format) -> None:
    matrix = row(FLT_MAX, -FLT_MAX)
    codes, scale = quantize(fmt, matrix)
    assert codes.tolist() == [[fmt.traits.max_level, -fmt.traits.max_level]]
    assert np.isfinite(dequantize(fmt, codes, scale)).all()
    check_bounds(fmt, matrix)


@both_formats
def test_bounds_on_random_rows(fmt: Format) -> None:
    """Full float32 mantissas, every exponent of the row maximum."""
    rng = np.random.default_rng(1)
    matrix = rng.uniform(-1, 1, (254, 4096))
    matrix *= np.ldexp(1.0, np.arange(-126, 128))[:, None]
    check_bounds(fmt, matrix.astype(np.float32))


def finite_rows() -> st.SearchStrategy[F32]:
    """[N, K] with anything finite: denormals, huge values, values around the flush limits."""
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    near_limit = st.floats(-128 * SMALLEST_NORMAL, 128 * SMALLEST_NORMAL, width=32)
    shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6)
    elements = st.sampled_from([anything, near_limit, anything | st.just(0.0)])
    return elements.flatmap(lambda values: hnp.arrays(np.float32, shapes, elements=values))


@both_formats
@given(matrix=finite_rows())
@example(matrix=np.zeros((2, 3), np.float32))
def test_bounds_on_anything(fmt: Format, matrix: F32) -> None:
    check_bounds(fmt, matrix)


@both_formats
@given(matrix=finite_rows())
def test_rows_are_independent(fmt: Format, matrix: F32) -> None:
    codes, scale = quantize(fmt, matrix)
    for n in range(len(matrix)):
        alone, its_scale = quantize(fmt, matrix[n : n + 1])
        assert np.array_equal(alone[0], codes[n])
        assert its_scale[0] == scale[n]
