"""Conditions that packed weights meet, given their source, by how they were quantized."""

from __future__ import annotations

from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from ktconv import native

# In the manifest's record of a weight tensor: how its codes were chosen (absent: by the rule for
# scales alone), and the largest relative RMS error of a row, of codes that have no other bound.
CODES, ROW_ERROR_BOUND = "codes", "row_error_bound"
COMPENSATED = "gptq"  # such codes


class Proof(Struct, frozen=True):
    """Conditions of one packed matrix.

    `choice` made its scales, and its codes unless `row_error` is given. The importance in it can be
    unknown (`exact` False); then scales are only proven to be possible.
    """

    choice: native.Choice
    exact: bool = True
    factors: tuple[float, ...] = (1.0,)  # a scale is fl32(c * s), s by `choice`, c one of these
    row_error: float | None = None  # relative RMS error that no row exceeds; elements: any

    @staticmethod
    @cache
    def plain(rule: str) -> Proof:
        """A proof in which all columns count the same; asked for every matrix of a model."""
        return Proof(native.Choice.plain(rule))

    @property
    def rule(self) -> str:
        return self.choice.rule

    @property
    def scale(self) -> str:
        """The value of --scale that the rule belongs to."""
        return "amax" if self.rule == "amax" else "search"

    def columns(self, start: int, stop: int) -> Proof:
        """Proof of some of the columns."""
        if self.choice.importance is None:
            return self
        return replace(self, choice=self.choice.columns(start, stop))

    @property
    def sentence(self) -> str:
        """Origin of a scale, as part of a sentence: "the largest weight makes"."""
        if self.rule == "amax":
            return "the largest weight makes"
        if not self.exact:
            return "a search with unknown weights of errors gives"
        weighted = "weighted " if self.choice.importance is not None else ""
        found = f"the {weighted}search for the smallest error gives"
        if self.factors == (1.0,):
            return found
        return f"{', '.join(f'{factor:g}' for factor in self.factors)} times what {found} is"
