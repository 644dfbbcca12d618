r"""Patterns for names of modules, as PEFT has them in rank_pattern and alpha_pattern, matched in
bounded time.

PEFT's rule: of many patterns the first that `re.match(r"(.*\.)?(PATTERN)$", name)` finds counts.
`re` tries one way after another, and a pattern such as (x+x+)+y has more ways than there is time,
while adapters come from strangers. So patterns are compared here, with sets of positions in the
place of one: time grows with the length of pattern and name. Names without any syntax, of which an
adapter may have one for each module, are looked up.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

MAX_CHARACTERS = 200_000  # of all patterns that are more than names
MAX_STEPS = 2_000_000  # a few seconds
_MAX_NESTED = 40

_PLAIN = re.compile(r"\^?(?:[A-Za-z0-9_-]|\\?\.|\\-)+")  # a name, in which . may be any character
_REPEATED = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda one: one.isalnum() or one == "_",
    "s": str.isspace,
}


class PatternError(Exception):
    """Why patterns cannot be matched, as the end of a sentence about them."""


class Patterns:
    """Many patterns, and which of them is the first that matches a name.

    PatternError for text that is no regular expression, for what this does not have
    (backreferences, flags, possessive repeats), and for patterns that take too long.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._texts = list(patterns)
        self._names: dict[_Shape, dict[str, int]] = {}
        self._others: list[tuple[int, _Node]] = []
        self._found: dict[str, str | None] = {}
        self._steps = 0
        characters = 0
        for number, text in enumerate(self._texts):
            if _PLAIN.fullmatch(text):
                shape, name = _shape(text)
                self._names.setdefault(shape, {}).setdefault(name, number)
                continue
            characters += len(text)
            if characters > MAX_CHARACTERS:
                raise PatternError("are too many or too long to be matched")
            self._others.append((number, _Parser(text).parsed()))

    def first(self, name: str) -> str | None:
        """The first that matches, None where none does."""
        if name not in self._found:
            number = self._first(name)
            self._found[name] = None if number is None else self._texts[number]
        return self._found[name]

    def _first(self, name: str) -> int | None:
        best: int | None = None
        for shape, names in self._names.items():
            self._spend(1 + shape.length // 8)
            number = names.get(shape.of(name))
            if number is not None and (best is None or number < best):
                best = number
        for number, node in self._others:
            if best is not None and number > best:
                break
            if _Search(name, self._spend).matches(node):
                return number
        return best

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise PatternError("take too long to be matched")


# ---- names -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
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
    """Of a pattern that is a name; and the name."""
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


# ---- what patterns consist of ------------------------------------------------------------


class _Search:
    """A name, and where parts of a pattern that begin at a position may end: bit n of a set is
    position n. What is found is kept, so that nothing is tried twice."""

    def __init__(self, name: str, spend: Callable[[int], None]) -> None:
        self.name, self._spend = name, spend
        self._ends: dict[tuple[int, int], int] = {}

    def matches(self, node: _Node) -> bool:
        """From the name's begin, or after a dot in it, to its end."""
        starts = [0, *(place + 1 for place, letter in enumerate(self.name) if letter == ".")]
        return any(self.ends(node, start) >> len(self.name) & 1 for start in starts)

    def ends(self, node: _Node, start: int) -> int:
        key = id(node), start
        if key not in self._ends:
            self._spend(1)
            self._ends[key] = node.ends(self, start)
        return self._ends[key]

    def after(self, node: _Node, starts: int) -> int:
        """Where it ends from any of these positions on."""
        found = 0
        for start in _bits(starts):
            self._spend(1)
            found |= self.ends(node, start)
        return found


def _bits(positions: int) -> Iterator[int]:
    while positions:
        low = positions & -positions
        yield low.bit_length() - 1
        positions ^= low


class _Node(ABC):
    @abstractmethod
    def ends(self, search: _Search, start: int) -> int:
        """The set of positions where it may end."""


@dataclass(eq=False)
class _Letter(_Node):
    """One character that passes a test."""

    test: Callable[[str], bool]

    def ends(self, search: _Search, start: int) -> int:
        name = search.name
        return 1 << (start + 1) if start < len(name) and self.test(name[start]) else 0


@dataclass(eq=False)
class _Place(_Node):
    """Nothing, where a test of name and position passes."""

    test: Callable[[str, int], bool]

    def ends(self, search: _Search, start: int) -> int:
        return 1 << start if self.test(search.name, start) else 0


@dataclass(eq=False)
class _Sequence(_Node):
    parts: list[_Node] = field(default_factory=list)

    def ends(self, search: _Search, start: int) -> int:
        positions = 1 << start
        for part in self.parts:
            positions = search.after(part, positions)
        return positions


@dataclass(eq=False)
class _Choice(_Node):
    branches: list[_Node]

    def ends(self, search: _Search, start: int) -> int:
        found = 0
        for branch in self.branches:
            found |= search.ends(branch, start)
        return found


@dataclass(eq=False)
class _Repeat(_Node):
    """`least` to `most` times; None: any number of times."""

    part: _Node
    least: int
    most: int | None

    def ends(self, search: _Search, start: int) -> int:
        positions = 1 << start
        # A part goes forward or stays: after more rounds than there are positions nothing changes.
        rounds = len(search.name) + 2
        for _ in range(min(self.least, rounds)):
            positions = search.after(self.part, positions)
        found = latest = positions
        for _ in range(rounds if self.most is None else min(self.most - self.least, rounds)):
            latest = search.after(self.part, latest) & ~found
            found |= latest
        return found


@dataclass(eq=False)
class _Look(_Node):
    """Whether something is ahead of a position, or behind it."""

    part: _Node
    behind: bool
    wanted: bool

    def ends(self, search: _Search, start: int) -> int:
        if self.behind:
            there = any(search.ends(self.part, one) >> start & 1 for one in range(start + 1))
        else:
            there = search.ends(self.part, start) != 0
        return 1 << start if there == self.wanted else 0


def _is_word(name: str, place: int) -> bool:
    return 0 <= place < len(name) and _CLASSES["w"](name[place])


_PLACES: dict[str, Callable[[str, int], bool]] = {
    "^": lambda name, place: place == 0,
    "$": lambda name, place: place == len(name),
    "A": lambda name, place: place == 0,
    "Z": lambda name, place: place == len(name),
    "b": lambda name, place: _is_word(name, place - 1) != _is_word(name, place),
    "B": lambda name, place: _is_word(name, place - 1) == _is_word(name, place),
}
_GROUPS: dict[str, tuple[bool, bool] | None] = {  # behind, wanted
    "?:": None, "?=": (False, True), "?!": (False, False),
    "?<=": (True, True), "?<!": (True, False),
}  # fmt: skip


# ---- reading them ------------------------------------------------------------------------


class _Parser:
    """Reads what `re` calls a regular expression, as far as the nodes above have it."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._nested = text, 0, 0

    def parsed(self) -> _Node:
        found = self._choice()
        if self._at < len(self._text):
            raise self._wrong()
        return found

    def _wrong(self) -> PatternError:
        return PatternError(f"include {self._text!r:.60}, which is no regular expression")

    def _unknown(self, what: str) -> PatternError:
        return PatternError(f"include {self._text!r:.60}, and {what} are not read here")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if not (found := self._next()):
            raise self._wrong()
        self._at += 1
        return found

    def _accepted(self, start: str) -> bool:
        there = self._text.startswith(start, self._at)
        self._at += len(start) if there else 0
        return there

    def _choice(self) -> _Node:
        branches = [self._sequence()]
        while self._accepted("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Choice(branches)

    def _sequence(self) -> _Node:
        found = _Sequence()
        while self._next() not in ("", "|", ")"):
            part = self._part()
            found.parts.append(self._repeated(part))
        return found

    def _part(self) -> _Node:
        letter = self._take()
        if letter == "(":
            return self._group()
        if letter == "[":
            return _Letter(self._set())
        if letter == ".":
            return _Letter(lambda one: one != "\n")
        if letter in "^$":
            return _Place(_PLACES[letter])
        if letter == "\\":
            return self._escaped()
        if letter in "*+?":
            raise self._wrong()  # of nothing
        return _Letter(letter.__eq__)

    def _repeated(self, part: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return part
        if isinstance(part, _Place):
            raise self._wrong()
        if self._accepted("+"):
            raise self._unknown("possessive repeats")
        self._accepted("?")  # as few as possible: the same names match
        if self._next() in ("*", "+", "?") or self._bounds() is not None:
            raise self._wrong()
        return _Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        """How often the part before is repeated; None where nothing says that it is."""
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accepted(sign):
                return bounds
        found = _REPEATED.match(self._text, self._at)
        if found is None or not (found[1] or found[2]):
            return None  # a brace as it is
        self._at = found.end()
        least = int(found[1][-9:] or 0)
        if not found[2]:
            return least, least
        most = int(found[3][-9:]) if found[3] else None
        if most is not None and most < least:
            raise self._wrong()
        return least, most

    def _group(self) -> _Node:
        self._nested += 1
        if self._nested > _MAX_NESTED:
            raise self._unknown(f"more than {_MAX_NESTED} groups in each other")
        look = None
        if self._next() == "?":
            if self._accepted("?P<"):
                if not self._text[self._at :].partition(">")[0].isidentifier():
                    raise self._wrong()
                self._at = self._text.index(">", self._at) + 1
            else:
                kind = next(filter(self._accepted, _GROUPS), None)
                if kind is None:
                    raise self._unknown("flags, conditions and references to groups")
                look = _GROUPS[kind]
        found = self._choice()
        if not self._accepted(")"):
            raise self._wrong()
        self._nested -= 1
        # In a sequence of its own, so that ^ may be repeated in it.
        return _Sequence([found]) if look is None else _Look(found, *look)

    def _escaped(self) -> _Node:
        letter = self._take()
        if letter in _PLACES and letter not in "^$":
            return _Place(_PLACES[letter])
        return _Letter(self._test(letter))

    def _test(self, letter: str) -> Callable[[str], bool]:
        """Of a character after a backslash."""
        if letter.lower() in _CLASSES:
            test = _CLASSES[letter.lower()]
            return test if letter.islower() else lambda one: not test(one)
        if letter.isascii() and letter.isalnum():
            raise self._unknown("references to groups, and characters by number")
        return letter.__eq__

    def _set(self) -> Callable[[str], bool]:
        """After a bracket."""
        negative, tests = self._accepted("^"), list[Callable[[str], bool]]()
        while not tests or self._next() != "]":
            first = self._take()
            if first == "\\":
                tests.append(self._test(self._take()))
                if self._next() == "-" and not self._text.startswith("-]", self._at):
                    raise self._unknown("ranges of escaped characters")
                continue
            if self._next() == "-" and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._take()
                if last == "\\":
                    raise self._unknown("ranges of escaped characters")
                if last < first:
                    raise self._wrong()
                tests.append(lambda one, low=first, high=last: low <= one <= high)  # type: ignore[misc]
            else:
                tests.append(first.__eq__)
        self._at += 1
        return lambda one: any(test(one) for test in tests) != negative
