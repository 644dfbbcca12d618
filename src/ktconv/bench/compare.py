"""Ratios of a new report to an old one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ktconv.bench.rows import Row
from ktconv.bench.run import SCHEMA
from ktconv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ratio:
    """`ratio` is new over old time: above 1 is slower."""

    row: Row
    old_us: float
    ratio: float

    def regressed(self, tolerance: float) -> bool:
        return self.ratio > 1 + tolerance


def read_report(path: Path) -> list[Row]:
    """The rows of a JSON report. Raises UsageError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON", "write it with --format json") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a report of ktconv bench", "write it with --format json")
    names = {field.name for field in fields(Row)}
    try:
        return [Row(**{k: v for k, v in row.items() if k in names}) for row in content["rows"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} lacks what a report needs: {error}") from None


def compare(new: Sequence[Row], old: Sequence[Row]) -> list[Ratio]:
    """Pairs of rows that measured the same thing. Raises UsageError if there are none."""
    by_key: dict[tuple[Any, ...], Row] = {row.key: row for row in old}
    found = [
        Ratio(row, by_key[row.key].median_us, row.median_us / by_key[row.key].median_us)
        for row in new
        if row.key in by_key
    ]
    if not found:
        raise UsageError(
            "no row of the old report measured what this run measured",
            "give the same --method, --shape, --tokens, --threads and --routing as then",
        )
    return found


def describe(ratios: Sequence[Ratio], tolerance: float) -> list[str]:
    """A line for each pair, regressions marked."""
    return [
        f"{r.row.shape['name']}  {r.row.method}  {r.row.isa}  {r.row.threads} threads  "
        f"{r.row.tokens} tokens: {r.old_us:.0f} -> {r.row.median_us:.0f} us, "
        f"x{r.ratio:.2f}{'  REGRESSION' if r.regressed(tolerance) else ''}"
        for r in ratios
    ]
