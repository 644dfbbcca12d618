"""The result of comparing two conversions, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from ktconv.system.units import counted

Verdict = Literal["equal bytes", "equal weights", "different"]

SCHEMA = 1
WORST_SHOWN = 5  # matrices in the summary
NAMED = 8  # places in one sentence
LISTED = 50  # sentences of one kind


class Comparison(Struct, frozen=True):
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
        kind: dict[str, Any] = {"schema": SCHEMA, "kind": "comparison", "passed": self.equal}
        sides = {"a": self.a["path"], "b": self.b["path"]}
        return kind | asdict(self) | sides | {"conversions": {"a": self.a, "b": self.b}}

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


# ---- words -----------------------------------------------------------------------------


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def step_words(steps: float) -> str:
    return (
        f"{steps:.4g} quantization steps" if math.isfinite(steps) else "values that are not numbers"
    )


def more_words(count: int, word: str) -> list[str]:
    return [f"... and {counted(count, f'more {word}')}"] if count > 0 else []


def shortened(sentences: Sequence[str], word: str) -> list[str]:
    """The first sentences of one kind, and how many more there are."""
    return [*sentences[:LISTED], *more_words(len(sentences) - LISTED, word)]


def matrix_words(layer: int, expert: int, proj: str) -> str:
    return f"Layer {layer}, expert {expert}, {proj}"


def place_words(places: Sequence[Mapping[str, Any]]) -> str:
    words = [" ".join(f"{key} {value}" for key, value in place.items()) for place in places]
    more = f" and {len(words) - NAMED:,} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]).replace("tensor ", "").replace("projection ", "") + more


def words_about(side: Mapping[str, Any]) -> str:
    method = (side["method"] or "several or unknown formats").upper()
    parts = counted(side["numa"], "NUMA part") if side["numa"] else "several numbers of NUMA parts"
    layers = counted(len(side["layers"]), "layer")
    return f"{side['path']}: {method}, {parts}, {layers}, as {side['layout']}"


def words_of_matrix(matrix: Mapping[str, Any]) -> str:
    """One of the worst matrices as a line."""
    place = matrix_words(matrix["layer"], matrix["expert"], matrix["projection"])
    if "row" not in matrix:
        return f"{place}: the bytes differ."
    keys = ("relative_rms_difference", "cosine", "max_difference_steps", "value_a", "value_b")
    relative, cosine, steps, first, second = (
        "not finite" if matrix[key] is None else f"{matrix[key]:.6g}" for key in keys
    )
    return (
        f"{place}: relative RMS {relative}, cosine {cosine}, at most {steps} steps, "
        f"{matrix['differing_elements']:,} of {matrix['elements']:,} elements; first "
        f"[{matrix['row']}, {matrix['column']}], {first} in A, {second} in B"
    )
