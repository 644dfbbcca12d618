"""Sizes and ranges as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconv.errors import UsageError
from ktconv.system.units import counted, format_ranges, format_size, parse_ranges, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1B", 1),
        ("5GB", 5_000_000_000),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("1.5 MB", 1_500_000),
        ("0.5KiB", 512),
        (" 2 K ", 2000),
        ("3Ki", None),
        ("1TiB", 1 << 40),
        ("2PB", 2 * 10**15),
        ("9007199254740993", 2**53 + 1),
        ("", None),
        ("0", None),
        ("0.0001B", None),
        ("-5GB", None),
        ("5 parsecs", None),
        ("GB", None),
        ("1e9", None),
        ("٣GB", None),
    ],
)
def test_parse_size(text: str, size: int | None) -> None:
    if size is not None:
        assert parse_size(text, "--max-memory") == size
        return
    with pytest.raises(UsageError, match="--max-memory") as caught:
        parse_size(text, "--max-memory")
    assert caught.value.exit_code == 2
    assert "5GB or 8GiB" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_960, "1.0 MB"),
        (17_400_000_000, "17.4 GB"),
        (1_300_000_000_000, "1.30 TB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 10**14))
def test_format_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size), "x") == pytest.approx(size, rel=0.051)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", [0]),
        ("0-3,7", [0, 1, 2, 3, 7]),
        ("7,0-3", [0, 1, 2, 3, 7]),
        ("3, 3 ,2 - 4", [2, 3, 4]),
        ("5-5", [5]),
    ],
)
def test_parse_ranges(text: str, numbers: list[int]) -> None:
    assert parse_ranges(text, "--layers") == numbers


@pytest.mark.parametrize("text", ["", ",", "1,", "3-1", "a", "1-", "-1", "1.5", "0-999999999999"])
def test_parse_ranges_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="--layers"):
        parse_ranges(text, "--layers")


@given(st.lists(st.integers(0, 60), min_size=1))
def test_ranges_round_trip(numbers: list[int]) -> None:
    assert parse_ranges(format_ranges(numbers), "--layers") == sorted(set(numbers))


def test_format_ranges() -> None:
    assert format_ranges([]) == ""
    assert format_ranges([4, 0, 1, 2, 7, 8]) == "0-2,4,7-8"


def test_things_are_counted_in_words() -> None:
    assert counted(1, "expert") == "1 expert"
    assert counted(0, "matrix") == "0 matrices"
    assert counted(2000, "copy") == "2,000 copies"
    assert counted(1, "other tensor", "have") == "1 other tensor has"
    assert counted(2, "tensor", "are") == "2 tensors are"
    assert counted(1, "thread", "need") == "1 thread needs"
