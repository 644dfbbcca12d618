"""The table of formats: constraints, sizes, the split into parts, and its weight."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconv.formats import (
    BACKWARD,
    INT4,
    INT8,
    PROJECTIONS,
    Format,
    Matrix,
    matrix_shape,
    output_formats,
    packed_shape,
    split,
)
from ktconv.formats.scales import error_bound

both_formats = pytest.mark.parametrize("fmt", output_formats().values(), ids=lambda fmt: fmt.key)


def allowed(fmt: Format, hidden: int, intermediate: int, parts: int) -> bool:
    """The three conditions of SPEC 4.1, as they stand there."""
    tile = {"int8": 64, "int4": 128}[fmt.key]
    return intermediate % parts == 0 and hidden % tile == 0 and (intermediate // parts) % tile == 0


@both_formats
@given(hidden=st.integers(1, 40), intermediate=st.integers(1, 40), unit=st.sampled_from([32, 64]))
def test_parts_by_brute_force(fmt: Format, hidden: int, intermediate: int, unit: int) -> None:
    h, i = hidden * unit, intermediate * unit
    expected = [parts for parts in range(1, i + 1) if allowed(fmt, h, i, parts)]
    assert fmt.allowed_parts(h, i) == expected
    for parts in range(1, 50):
        assert (fmt.check(h, i, parts) is None) == allowed(fmt, h, i, parts)


@both_formats
@given(hidden=st.integers(1, 600), intermediate=st.integers(1, 600), parts=st.integers(1, 12))
def test_check_agrees_with_every_matrix(
    fmt: Format, hidden: int, intermediate: int, parts: int
) -> None:
    """A layer is fine exactly when each of its six matrices is."""
    fine = intermediate % parts == 0 and all(
        fmt.check_matrix(*packed_shape(proj, hidden, intermediate, parts)) is None
        for proj in PROJECTIONS + BACKWARD
    )
    assert (fmt.check(hidden, intermediate, parts) is None) == fine


def test_reasons_name_the_numbers() -> None:
    assert INT4.check(100, 256, 1) == "hidden size 100 is not a multiple of 128, as INT4 needs"
    assert INT4.check(128, 256, 3) == "intermediate size 256 does not divide into 3 parts"
    assert INT8.check(64, 192, 2) == (
        "intermediate size 192 in 2 parts is 96 per part, not a multiple of 64, as INT8 needs"
    )
    assert INT8.check(64, 192, 0) == "0 parts: at least 1 is needed"
    assert INT4.allowed_parts(2048, 768) == [1, 2, 3, 6]


def test_sizes() -> None:
    """The example of SPEC 2.1: H = I = 256, two parts."""
    rows, cols = packed_shape("gate", 256, 256, 2)
    assert (INT4.layout.weight_size(rows, cols), INT4.layout.scale_size(rows, cols)) == (16384, 512)
    rows, cols = packed_shape("down", 256, 256, 2)
    assert (INT4.layout.weight_size(rows, cols), INT4.layout.scale_size(rows, cols)) == (
        16384,
        1024,
    )
    assert INT8.layout.weight_size(rows, cols) == rows * cols


@pytest.mark.parametrize("proj", PROJECTIONS + BACKWARD)
@given(hidden=st.integers(1, 9), width=st.integers(1, 9), parts=st.integers(1, 5))
def test_parts_cover_the_matrix_once(proj: Matrix, hidden: int, width: int, parts: int) -> None:
    intermediate = width * parts
    count = np.zeros(matrix_shape(proj, hidden, intermediate), int)
    for part in range(parts):
        owned = split(proj, hidden, intermediate, part, parts)
        count[owned.index] += 1
        expected = owned.shape[::-1] if proj in BACKWARD else owned.shape
        assert packed_shape(proj, hidden, intermediate, parts) == expected
        assert count[owned.index].shape == owned.shape
    assert (count == 1).all()


def test_split_of_rows_and_columns() -> None:
    assert split("up", 8, 6, 1, 3).index == (slice(2, 4), slice(0, 8))
    assert split("down", 8, 6, 1, 3).index == (slice(0, 8), slice(2, 4))
    for part, parts in ((3, 3), (-1, 3), (0, 4), (0, 0)):
        with pytest.raises(ValueError, match="of an intermediate size of 6"):
            split("up", 8, 6, part, parts)


def test_error_bounds_are_in_steps() -> None:
    half = np.array([0.5, 0.0], np.float32)
    for fmt, step in ((INT8, 0.5), (INT4, 8.0)):
        bounds = [fmt.max_error_steps * step, fmt.smallest_amax]
        assert error_bound(fmt, half).tolist() == bounds
        assert error_bound(fmt, half, 1.0)[0] == bounds[0] + step


def test_import_is_light() -> None:
    """A dry run needs the table only."""
    code = "import sys, ktconv.formats; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
