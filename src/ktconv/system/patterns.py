r"""Patterns for names of modules, as PEFT has them in rank_pattern and alpha_pattern, matched in
bounded time.

PEFT's rule: of many patterns the first that `re.match(r"(.*\.)?(PATTERN)$", name)` finds counts.
Adapters come from strangers, and a pattern such as (x|xx)+y has more ways to match than there is
time: the package `regex` tries them, which `re` cannot be stopped at. It has more syntax, such as
(?R) for the whole pattern again: what `re` does not take is refused, and what it takes otherwise is
written so that both mean the same. Names without any syntax, of which an adapter may have one for
each module, are looked up.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

MAX_CHARACTERS = 200_000  # of all patterns that are more than names, with repeats written out
# CPU time for all names together. `regex` gets what is left of it as its limit, and counts the
# CPU time of all threads.
MAX_SECONDS = 5.0

_PLAIN = re.compile(r"\^?(?:[A-Za-z0-9_-]|\\?\.|\\-)+")  # a name, in which . may be any character
_TIMES = re.compile(r"\{([0-9]+)")  # `regex` compiles {1000} as a thousand parts
# Characters in `re`: a brace that repeats nothing, and a colon after a bracket in a set. In `regex`
# a number of errors begins with one, a class of POSIX with the other. What is escaped is passed by.
_OTHERWISE = re.compile(r"(\\N\{[^}]*\}|\\.)|(?<=\[):|\{(?![0-9]*,?[0-9]*\})", re.DOTALL)


class PatternError(Exception):
    """Reason why patterns cannot be matched, as the end of a sentence about them."""


class Patterns:
    """Many patterns, and which of them is the first that matches a name.

    PatternError for text that is no regular expression, and for patterns that take too long.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._texts = list(patterns)
        self._names: dict[_Shape, dict[str, int]] = {}
        self._found: dict[str, str | None] = {}
        self._seconds = MAX_SECONDS  # that are left
        others: dict[int, str] = {}
        for number, text in enumerate(self._texts):
            if _PLAIN.fullmatch(text):
                shape, name = _shape(text)
                self._names.setdefault(shape, {}).setdefault(name, number)
            else:
                others[number] = text
        if sum(map(_characters, others.values())) > MAX_CHARACTERS:
            raise PatternError("are too many or too long to be matched")
        self._others = {number: _compiled(text) for number, text in others.items()}

    def first(self, name: str) -> str | None:
        """The first that matches, None where none does."""
        if name not in self._found:
            started = time.thread_time()
            try:
                number = self._first(name)
            except TimeoutError:
                self._seconds = 0.0  # for other names, too
                raise PatternError("take too long to be matched") from None
            self._seconds -= time.thread_time() - started
            self._found[name] = None if number is None else self._texts[number]
        return self._found[name]

    def _first(self, name: str) -> int | None:
        found = (names.get(shape.of(name)) for shape, names in self._names.items())
        best = min((number for number in found if number is not None), default=None)
        deadline = time.thread_time() + self._seconds
        for number, pattern in self._others.items():
            if best is not None and number > best:
                break
            if (left := deadline - time.thread_time()) <= 0:
                raise TimeoutError
            if pattern.match(name, timeout=left):
                return number
        return best


def _characters(text: str) -> int:
    """The length of a pattern with its repeats written out."""
    return len(text) * math.prod(max(1, int(times[:9])) for times in _TIMES.findall(text))


def _compiled(text: str) -> Any:
    import regex

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that later versions may read otherwise
            re.compile(rf"(.*\.)?({text})$")
        return regex.compile(rf"(.*\.)?({_OTHERWISE.sub(_as_in_re, text)})$")
    except (re.error, regex.error, OverflowError):
        raise PatternError(f"include {text!r:.60}, which is no regular expression") from None
    except RecursionError:
        raise PatternError(f"include {text!r:.60}, which has too many groups in one") from None


def _as_in_re(found: re.Match[str]) -> str:
    return found[0] if found[1] else f"\\{found[0]}"


# ---- names -------------------------------------------------------------------------------


class _Shape(Struct, frozen=True):
    """Patterns of one length, with a `.` that is any character in the same places."""

    anchored: bool  # it begins with ^
    length: int
    wild: tuple[int, ...]

    def of(self, name: str) -> str:
        """The end of a name as it is written in the patterns that match it; else empty."""
        rest = len(name) - self.length
        if rest < 0 or (rest and (self.anchored or name[rest - 1] != ".")):
            return ""
        end = name[rest:]
        if not self.wild:
            return end
        letters = list(end)
        for place in self.wild:
            letters[place] = "."
        return "".join(letters)


def _shape(text: str) -> tuple[_Shape, str]:
    """Shape of a pattern that is a name; and the name."""
    anchored, wild, name = text.startswith("^"), list[int](), list[str]()
    escaped = False
    for letter in text[anchored:]:
        if letter == "\\":
            escaped = True
            continue
        if letter == "." and not escaped:
            wild.append(len(name))
        name.append(letter)
        escaped = False
    return _Shape(anchored, len(name), tuple(wild)), "".join(name)
