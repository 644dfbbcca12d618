"""Sizes, counts and ranges as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ktconv.errors import UsageError

_FACTORS = {"": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _FACTORS[_letter] = _FACTORS[_letter + "B"] = 1000**_power
    _FACTORS[_letter + "IB"] = 1024**_power
_FACTORS["B"] = 1
_SIZE = re.compile(r"\s*([0-9]{1,99}(?:\.[0-9]{1,99})?)\s*([A-Za-z]*)\s*")
_MOST_BYTES = 2**63 - 1  # that a file or an address space can have

_RANGE = re.compile(r"\s*(-?[0-9]+)(?:\s*-\s*([0-9]+))?\s*")
_MOST_DIGITS, _MOST_NUMBERS = 9, 100_000


def parse_size(text: str, option: str) -> int:
    """Bytes of "5GB" (powers of 1000) or "8GiB" (powers of 1024)."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{option} {text!r} is not a size", "write it like 5GB or 8GiB")
    number = match[1]  # large whole numbers must not lose digits
    size = int(number) * factor if number.isdecimal() else round(float(number) * factor)
    if size < 1:
        raise UsageError(f"{option} {text!r} is not a positive size", "write it like 5GB or 8GiB")
    if size > _MOST_BYTES:
        raise UsageError(
            f"{option} {text!r} is larger than any file or memory can be",
            "write it like 5GB or 8GiB",
        )
    return size


def format_size(size: float) -> str:
    """Bytes in powers of 1000 with three or four digits: "17.4 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def format_rate(bytes_per_second: float) -> str:
    """ "17.4 GB/s", in the unit that shows its digits."""
    return f"{format_size(bytes_per_second)}/s"


def parse_ranges(text: str, option: str) -> list[int]:
    """The numbers of "0-3,7", ascending, each once."""
    numbers: set[int] = set()
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise UsageError(f"{option} {text!r} is not a list of numbers", "write it like 0-3,7")
        first, last = match[1], match[2] or match[1]
        if wrong := _why_no_range(first, last):
            raise UsageError(f"{option} {text!r} cannot be used: {wrong}", "write it like 0-3,7")
        numbers.update(range(int(first), int(last) + 1))
    return sorted(numbers)


def _why_no_range(first: str, last: str) -> str | None:
    if first.startswith("-"):
        return f"{first} is less than 0"
    for number in (first, last):
        if len(number.lstrip("0")) > _MOST_DIGITS:
            return f"{number} is larger than {10**_MOST_DIGITS - 1}"
    if int(first) > int(last):
        return f"{first} is larger than {last}"
    if int(last) - int(first) >= _MOST_NUMBERS:
        return f"{first}-{last} are more than {_MOST_NUMBERS} numbers"
    return None


def format_ranges(numbers: list[int]) -> str:
    """The inverse of `parse_ranges`: "0-3,7"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_duration(seconds: float) -> str:
    """ "1:02:03" or "2:03" """
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_SINGULAR = {"are": "is", "have": "has", "were": "was", "do": "does"}


def counted(count: int, word: str, verb: str = "") -> str:
    """ "1 file", "2,000 files", with `verb` "have" "1 file has", "2 files have": a number of things
    in words; `word` names one of them, `verb` says what several of them do."""
    does = verb if count != 1 else _SINGULAR.get(verb, f"{verb}s") if verb else ""
    return f"{count:,} {word if count == 1 else _plural(word)} {does}".rstrip()


def listed(word: str, numbers: Iterable[int]) -> str:
    """ "layer 3", "layers 0-3,7": things that have numbers; `word` names one of them."""
    found = sorted(set(numbers))
    return f"{word if len(found) == 1 else _plural(word)} {format_ranges(found)}"


def _plural(word: str) -> str:
    if word.endswith("x"):
        return f"{word[:-1]}ces"  # matrix
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}s"
