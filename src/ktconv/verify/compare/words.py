"""Sentences about what was compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

NAMED = 8  # places in one sentence
LISTED = 50  # sentences of one kind


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def counted(count: int, word: str) -> str:
    plural = f"{word[:-1]}ces" if word.endswith("x") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"


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
    relative, cosine, steps, first, second = (
        "not finite" if matrix[key] is None else f"{matrix[key]:.6g}"
        for key in (
            "relative_rms_difference",
            "cosine",
            "max_difference_steps",
            "value_a",
            "value_b",
        )
    )
    return (
        f"{place}: relative RMS {relative}, cosine {cosine}, at most {steps} steps, "
        f"{matrix['differing_elements']:,} of {matrix['elements']:,} elements; first "
        f"[{matrix['row']}, {matrix['column']}], {first} in A, {second} in B"
    )
