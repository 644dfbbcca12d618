"""Factors of folding: exact values, records."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from ktconv.formats.folding import (
    LARGEST,
    STEPS,
    FoldError,
    decode,
    encode,
    factors,
    folded_importance,
    nearest_exponents,
)

ALL = np.arange(-2 * LARGEST, 2 * LARGEST + 1)


def exact(sixteenths: Fraction) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        power = Decimal(sixteenths.numerator) / Decimal(sixteenths.denominator) / STEPS
        return Decimal(2) ** power


def test_factors_are_correctly_rounded() -> None:
    for exponent, factor in zip(ALL, factors(ALL), strict=True):
        truth = exact(Fraction(int(exponent)))
        below, above = (np.nextafter(factor, np.float32(way)) for way in (0, np.inf))
        error = abs(Decimal(float(factor)) - truth)
        assert error < min(abs(Decimal(float(other)) - truth) for other in (below, above))


def test_a_factor_and_its_inverse_cancel() -> None:
    products = factors(ALL).astype(np.float64) * factors(-ALL)
    assert np.abs(products - 1).max() < 2.0**-23


def test_the_nearest_exponent() -> None:
    np.testing.assert_array_equal(nearest_exponents(factors(ALL)), ALL)
    for exponent in (-200, -17, -1, 0, 5, 15, 16, 133):
        middle = exact(Fraction(2 * exponent + 1, 2))
        near = np.float32(float(middle))
        for value in (np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
            above = Decimal(float(value)) > middle
            assert nearest_exponents(np.array([value]))[0] == exponent + above


def test_importance_of_folded_columns() -> None:
    exponents = np.array([-127, -1, 0, 16, 127], np.int8)
    squares = folded_importance(None, exponents)
    np.testing.assert_allclose(squares, factors(exponents).astype(np.float64) ** 2, rtol=2e-7)
    given = np.array([3, 0, 1, 2, 1], np.float32)
    np.testing.assert_array_equal(folded_importance(given, exponents), given * squares)


def test_records() -> None:
    exponents = np.arange(-127, 128, dtype=np.int8)
    np.testing.assert_array_equal(decode(encode(exponents), 255), exponents)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "not a string"),
        (7, "not a string"),
        ("AA*A", "not base64"),
        ("AAA", "not base64"),
        ("AAAä", "not base64"),
        ("AAAA", "for 3 channels, not 4"),
        ("", "for 0 channels, not 4"),
        (encode(np.array([0, 1, -128, 0])), "beyond -127 .. 127"),
    ],
)
def test_other_records_are_refused(record: object, why: str) -> None:
    with pytest.raises(FoldError, match=why):
        decode(record, 4)
