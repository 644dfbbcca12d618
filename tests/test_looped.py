"""Tests that run for many values: all of them, and a failure says which."""

from __future__ import annotations

import inspect

import pytest
from helpers.looped import each


def test_all_values_are_tried_and_the_wrong_one_is_named() -> None:
    seen = []

    @each("a", [1, 2])
    @each("b, c", [(3, 4), (5, 6)])
    def one(fixture: str, a: int, b: int, c: int) -> None:
        seen.append((fixture, a, b, c))
        assert (a, c) != (2, 6), "they meet"

    assert list(inspect.signature(one).parameters) == ["fixture"]
    with pytest.raises(AssertionError, match=r"with a = 2: with b = 5, c = 6: they meet"):
        one(fixture="x")
    assert seen == [("x", 1, 3, 4), ("x", 1, 5, 6), ("x", 2, 3, 4), ("x", 2, 5, 6)]


def test_what_would_check_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values of a"):
        each("a", [])
    with pytest.raises(ValueError, match="takes no a"):
        each("a", [1])(lambda b: None)
