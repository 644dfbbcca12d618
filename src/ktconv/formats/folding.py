"""Factors that move between up and down of one expert without changing what it computes (SPEC 9).

Row i of up is multiplied by s_i and column i of down by 1 / s_i, s_i = 2^(e_i / 16) with an integer
exponent e_i of int8. Factors have the same bits on every machine: they come from integer roots.
"""

from __future__ import annotations

import base64
import binascii
from functools import cache
from math import isqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from ktconv.system.arrays import F32, I8, I64, Array

Fold = Literal["", "up-down"]  # what is folded; "": nothing

STEPS = 16  # exponents per octave
LARGEST = 127  # exponent, of either sign


class FoldError(ValueError):
    """Something that is no record of exponents."""


def factors(exponents: Array) -> F32:
    """2^(e / 16) in binary32, correctly rounded, of integer exponents of any sign."""
    wide = exponents.astype(np.int64)
    found: F32 = np.ldexp(_mantissas()[wide % STEPS], (wide // STEPS).astype(np.int32))
    return found


def folded_importance(importance: F32 | None, exponents: I8) -> F32:
    """Importance of down's folded columns [I], if that of its own columns is `importance` (None:
    all 1): an error of a folded column is one of s_i times that size."""
    squares = factors(2 * exponents.astype(np.int64))
    return squares if importance is None else importance * squares


def nearest_exponents(values: F32) -> I64:
    """round(16 log2 v) of positive v, in exact comparisons: equal on every machine."""
    mantissa, power = np.frexp(values.astype(np.float64))
    found: I64 = STEPS * (power.astype(np.int64) - 1)
    return found + np.searchsorted(_middles(), 2.0 * mantissa, side="right")


def encode(exponents: I8) -> str:
    """Text of exponents, as manifests record them."""
    return base64.b64encode(exponents.astype(np.int8).tobytes()).decode()


def decode(record: object, channels: int) -> I8:
    """The exponents [channels] of a manifest's record; FoldError for anything else."""
    if not isinstance(record, str):
        raise FoldError("exponents of folding are not a string")
    try:
        data = base64.b64decode(record, validate=True)
    except (binascii.Error, ValueError):
        raise FoldError("exponents of folding are not base64") from None
    if len(data) != channels:
        raise FoldError(f"exponents of folding are for {len(data)} channels, not {channels}")
    found = np.frombuffer(data, np.int8)
    if (found < -LARGEST).any():
        raise FoldError(f"an exponent of folding is beyond -{LARGEST} .. {LARGEST}")
    return found


@cache
def _mantissas() -> F32:
    """2^(k / 16) of k = 0 .. 15."""
    return np.array([_root(k, STEPS, 24) for k in range(STEPS)], np.float32)


@cache
def _middles() -> npt.NDArray[np.float64]:
    """2^((2 k + 1) / 32) of k = 0 .. 15, between which 16 log2 v rounds to one integer."""
    return np.array([_root(2 * k + 1, 2 * STEPS, 52) for k in range(STEPS)])


def _root(numerator: int, denominator: int, bits: int) -> float:
    """2^(numerator / denominator) with `bits` significant bits; of a denominator 2, 4, 8 .."""
    value = 1 << (numerator + bits * denominator)
    for _ in range(denominator.bit_length() - 1):
        value = isqrt(value)
    return float((value + 1) // 2) / (1 << (bits - 1))
