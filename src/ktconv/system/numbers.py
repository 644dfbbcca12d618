"""Numbers that callers give, checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ktconv.errors import UsageError
from ktconv.system.arrays import F64


def whole(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """`value`, an integer of any kind, such as NumPy's. UsageError names it where it is something
    else, or not from `least` to `most`."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise UsageError(f"{name} must be an integer, not {value!r:.60}")
    if most is not None and found > most:
        raise UsageError(f"{name} must be at most {most}")
    if found < least:
        raise UsageError(f"{name} must be {least} or more, not {found}")
    return found


def wholes(name: str, values: Any, least: int = 0) -> list[int]:
    """Whole numbers of a list, each as `whole` takes it."""
    if not isinstance(values, Iterable):
        raise UsageError(f"{name} must be a list of integers, not {values!r:.60}")
    return [whole(f"each of {name}", value, least) for value in values]


def real(name: str, value: Any) -> float:
    """`value` as a float. Raises UsageError, with `name`, for anything that is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} must be a number, not {value!r:.60}") from None


def reals(name: str, values: ArrayLike) -> F64:
    """`values` as an array of float64. Raises UsageError, with `name`, for anything else than
    numbers."""
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be an array of numbers") from None
