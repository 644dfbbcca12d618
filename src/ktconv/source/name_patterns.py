"""Names of many tensors as few patterns: what differs in numbers alone is one pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod

from msgspec import Struct

from ktconv.source.encodings import part_of
from ktconv.source.types import TensorRef
from ktconv.system.units import counted

_FEW = 3  # values of a number that belongs to a word, as in w1, w2, w3
# Words with a number that says which matrix it is, at the end of what comes before the number.
_MATRIX_WORD = re.compile(r"(?:^|[._/-])(?:w|fc|v|wi|lin|linear|proj|mat|ff|dense)_?$")
_MARK = "{}"


class NamePattern(Struct, frozen=True, dict=True):
    """Tensors whose names are equal up to numbers that vary."""

    text: str  # decoder.h.{}.moe.w_gate.{}.weight
    numbers: Sequence[tuple[int, ...]]  # of each tensor, in the order of the marks
    tensors: Sequence[TensorRef]

    @cached_property
    def base_and_part(self) -> tuple[str, str]:
        """The text without the ending that an encoding gives it, and the part that it is."""
        return part_of(self.text)

    @property
    def base(self) -> str:
        """decoder.h.{}.moe.w_gate.{}"""
        return self.base_and_part[0]

    @property
    def part(self) -> str:
        """The part of an encoding: weight"""
        return self.base_and_part[1]

    @cached_property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return list(dict.fromkeys(tensor.shape for tensor in self.tensors))

    @cached_property
    def dtypes(self) -> Sequence[str]:
        return list(dict.fromkeys(tensor.dtype for tensor in self.tensors))

    @cached_property
    def values(self) -> Sequence[Sequence[int]]:
        """The different values of each number, ascending."""
        return [sorted(set(column)) for column in zip(*self.numbers, strict=True)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def described(self) -> str:
        """2 x 64 tensors, BF16 [768, 2048]"""
        *counts, last = [len(values) for values in self.values] or [1]
        if prod(counts) * last != len(self.tensors):
            counts, last = [], len(self.tensors)
        tensors = "".join(f"{count} x " for count in counts) + counted(last, "tensor")
        shapes = [str(list(shape)) for shape in self.shapes[:2]]
        more = ", ..." if len(self.shapes) > 2 else ""
        dtypes = "/".join(self.dtypes)
        return f"{tensors}, {dtypes} {', '.join(shapes)}{more}"

    def marked(self, names: Mapping[int, str]) -> str:
        """The text with names for its marks, by their places: {layer} for the first, ..."""
        first, *rest = self.text.split(_MARK)
        marks = (f"{{{names[place]}}}" for place in range(len(rest)))
        return first + "".join(mark + literal for mark, literal in zip(marks, rest, strict=True))


def name_patterns(tensors: Iterable[TensorRef]) -> list[NamePattern]:
    """The patterns of these names, in the order of their first tensors."""
    groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], TensorRef]]] = {}
    for tensor in tensors:
        pieces = re.split("([0-9]+)", tensor.name)
        groups.setdefault(tuple(pieces[::2]), []).append((tuple(pieces[1::2]), tensor))
    return [
        pattern for literals, members in groups.items() for pattern in _patterns(literals, members)
    ]


def _patterns(
    literals: tuple[str, ...], members: list[tuple[tuple[str, ...], TensorRef]]
) -> Iterable[NamePattern]:
    """One pattern, or several where a number is part of a word."""
    for place in range(len(literals) - 1):
        found = dict.fromkeys(numbers[place] for numbers, _ in members)
        if len(found) > 1 and (len(found) > _FEW or not _in_word(literals, members, place)):
            continue
        for value in found:
            rest = [
                ((*numbers[:place], *numbers[place + 1 :]), tensor)
                for numbers, tensor in members
                if numbers[place] == value
            ]
            joined = literals[place] + value + literals[place + 1]
            yield from _patterns((*literals[:place], joined, *literals[place + 2 :]), rest)
        return
    numbers = [tuple(map(int, values)) for values, _ in members]
    yield NamePattern(_MARK.join(literals), numbers, [tensor for _, tensor in members])


def _in_word(
    literals: tuple[str, ...], members: list[tuple[tuple[str, ...], TensorRef]], place: int
) -> bool:
    """Whether a number with few values is part of a word, as in w1: by the word, or because
    tensors have other shapes with another value."""
    if _MATRIX_WORD.search(literals[place]):
        return True
    if not literals[place][-1:].isalpha():
        return False
    kinds: dict[str, set[tuple[int, ...]]] = {}
    for numbers, tensor in members:
        kinds.setdefault(numbers[place], set()).add(tensor.shape)
    first, *others = kinds.values()
    return any(first != other for other in others)
