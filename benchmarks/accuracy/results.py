"""Results, one JSON object per line, and the figures that tables and plots are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
KEY = ("model", "variant", "numa", "calibration", "evaluation")  # what tells rows apart


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def read_results(path: Path) -> list[Row]:
    """Rows of a file, the latest of each key; none where it does not exist."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return list({key_of(row): row for row in rows}.values())


def add_result(path: Path, row: Row) -> None:
    """Append a row, whole or not at all."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Ratio:
    """A mean KL divergence as a multiple of another one's on the same windows.

    `error`: standard error over the windows, which are taken as independent.
    """

    value: float
    error: float


def kl_ratio(windows: Sequence[float], base: Sequence[float]) -> Ratio:
    """Ratio of the means of paired values; its error to first order. NaN for a single window."""
    if len(windows) != len(base):
        raise ValueError(f"{len(windows)} windows cannot be compared with {len(base)} others")
    count, total = len(base), sum(base)
    value = sum(windows) / total
    if count < 2:
        return Ratio(value, math.nan)
    squares = sum((a - value * b) ** 2 for a, b in zip(windows, base, strict=True))
    return Ratio(value, math.sqrt(count / (count - 1) * squares) / total)


def select(rows: Iterable[Row], **wanted: Any) -> Iterator[Row]:
    """Rows that have these values."""
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            yield row


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Smallest, mean and largest. ValueError for no values."""
    found = sorted(values)
    if not found:
        raise ValueError("no values to take the spread of")
    return found[0], sum(found) / len(found), found[-1]
