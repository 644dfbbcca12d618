"""The result of comparing two conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ktconv.verify.compare.words import (
    NAMED,
    counted,
    more_words,
    words_about,
    words_of_matrix,
)

Verdict = Literal["equal bytes", "equal weights", "different"]

SCHEMA = 1
WORST_SHOWN = 5  # matrices in the summary


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result. `differences` and `notes` are whole sentences about A and B."""

    a: Mapping[str, Any]  # path, layout, method, numa, layers
    b: Mapping[str, Any]
    verdict: Verdict
    expected: bool  # different only as far as the options of both conversions explain it
    sample: float
    seed: int
    matrices: int  # compared
    elements: int
    other_tensors: int
    side_files: int
    layers: Sequence[Mapping[str, Any]]
    worst: Sequence[Mapping[str, Any]]
    only_in_a: Sequence[Mapping[str, Any]]
    only_in_b: Sequence[Mapping[str, Any]]
    differences: Sequence[str]
    notes: Sequence[str]

    @property
    def equal(self) -> bool:
        """Whether both have the same weights, as far as they were compared."""
        return self.verdict != "different"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON. A number that is not finite is null."""
        facts = asdict(self)
        sides = {"a": facts.pop("a"), "b": facts.pop("b")}
        return {
            "schema": SCHEMA,
            "kind": "comparison",
            "a": self.a["path"],
            "b": self.b["path"],
            "verdict": facts.pop("verdict"),
            "passed": self.equal,
            **{key: facts.pop(key) for key in ("expected", "sample", "seed")},
            "conversions": sides,
            **facts,
        }

    def lines(self) -> list[str]:
        """A short summary for people: the verdict, what differs, the worst matrices, notes."""
        share = f" (of a sample of {100 * self.sample:.4g} %)" if self.sample < 1 else ""
        return [
            f"{self.verdict}{share}: {counted(self.matrices, 'expert matrix')}, "
            f"{counted(self.other_tensors, 'other tensor')} and "
            f"{counted(self.side_files, 'side file')} compared",
            f"A: {words_about(self.a)}",
            f"B: {words_about(self.b)}",
            *self.differences[:NAMED],
            *more_words(len(self.differences) - NAMED, "difference"),
            *(words_of_matrix(matrix) for matrix in self.worst[:WORST_SHOWN]),
            *self.notes,
        ]
