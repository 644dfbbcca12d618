"""Numbers that callers give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.system.numbers import real, reals, whole


def test_integers_of_any_kind() -> None:
    for value in (3, np.int8(3), np.uint64(3), np.array(3)):
        found = whole("n", value, 3, 3)
        assert found == 3 and type(found) is int


@pytest.mark.parametrize(("value", "words"), [
    (True, "n must be an integer, not True"),
    (1.0, "n must be an integer, not 1.0"),
    (None, "n must be an integer, not None"),
    ("x" * 100, "n must be an integer, not 'x{59}$"),
    (0, "n must be 1 or more, not 0"),
    (10**30, "n must be at most 9$"),
])  # fmt: skip
def test_what_is_no_such_integer(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        whole("n", value, 1, 9)


def test_floats() -> None:
    assert real("scale", np.float16(0.5)) == 0.5
    for value in (None, "half", [1], 10**400):
        with pytest.raises(UsageError, match="scale must be a number, not "):
            real("scale", value)
    assert reals("load", [1, 2]).dtype == np.float64
    refused: tuple[Any, ...] = (["a"], object(), [[1], [1, 2]])
    for values in refused:
        with pytest.raises(UsageError, match="load must be an array of numbers"):
            reals("load", values)
