"""Rules for choosing scales and codes; see kt_rule and kt_choice."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, expect_rows

RULES: dict[str, int] = {"amax": lib.KT_RULE_AMAX, "search": lib.KT_RULE_SEARCH}
# Of older outputs, which are verified by it: the first revision of the search.
FORMER_RULES: dict[str, int] = {"search-1": lib.KT_RULE_SEARCH_1}
_NUMBERS = RULES | FORMER_RULES


class Choice:
    """A rule of `RULES` or `FORMER_RULES` and, for a search, what squared errors of each column
    count: float32 [cols], 0 .. 2^32; None: all the same. C refuses (ValueError) what it does not
    allow."""

    def __init__(self, rule: str, importance: Array | None = None) -> None:
        self.rule, self.importance = rule, importance
        self.c = ffi.new("kt_choice *")
        self.c.rule = _NUMBERS[rule]
        if importance is not None:
            expect_rows("importance", importance, np.float32, (len(importance),))
            self._kept = np.require(importance, requirements="A")
            self.c.importance = ffi.cast("float *", ffi.from_buffer(self._kept))

    @staticmethod
    @cache
    def plain(rule: str) -> Choice:
        """A rule under which all columns count the same."""
        return Choice(rule)

    def columns(self, start: int, stop: int) -> Choice:
        """The choice for some of the columns."""
        if self.importance is None:
            return self
        return Choice(self.rule, np.ascontiguousarray(self.importance[start:stop]))


def choice_of(choice: Choice | None, cols: int) -> Any:
    """A choice for C, of a matrix with `cols` columns."""
    if choice is None:
        return ffi.NULL
    if choice.importance is not None and len(choice.importance) != cols:
        raise ValueError(f"importance is for {len(choice.importance)} columns, not {cols}")
    return choice.c
