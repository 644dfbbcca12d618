"""A new report against an old one, row by row."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ktconv.bench.rows import Row
from ktconv.bench.run import SCHEMA, Report
from ktconv.errors import UsageError

_DIMENSIONS = ("hidden", "intermediate", "experts", "top_k")


@dataclass(frozen=True, slots=True)
class Old:
    """What is used of an old report."""

    path: Path
    cpu: str
    rows: list[Row]


def read_report(path: Path) -> Old:
    """Raises UsageError if the file is no report of `--format json`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON", "write it with --format json") from None
    if not isinstance(content, dict) or "rows" not in content or "limits" not in content:
        raise UsageError(f"{path} is not a report of ktconv bench", "write it with --format json")
    if content.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} has schema {content.get('schema')}, this ktconv reads {SCHEMA}",
            "measure again with this version",
        )
    try:
        machine = content.get("machine", {})
        return Old(path, str(machine.get("cpu", "")), [_row(row) for row in content["rows"]])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} lacks what a report needs: {error}") from None


def _row(facts: dict[str, Any]) -> Row:
    """Names that are not known are newer ones; those with a default may be missing."""
    known = {field.name for field in fields(Row)}
    needed = {field.name for field in fields(Row) if field.default is MISSING}
    if missing := needed - facts.keys():
        raise KeyError(min(missing))
    row = Row(**{name: value for name, value in facts.items() if name in known})
    if not all(isinstance(row.shape[name], int) for name in _DIMENSIONS):
        raise ValueError("a shape without its sizes")
    if not float(row.median_us) > 0:
        raise ValueError("a median that is not above 0")
    return row


def compare(report: Report, old: Old, tolerance: float) -> list[str]:
    """Gives the report's rows their ratios. Returns what people should know about it.

    Raises UsageError if no row of the old report measured what this one did.
    """
    by_key = {row.key: row for row in old.rows}
    unknown = [row for row in report.rows if row.key not in by_key]
    if len(unknown) == len(report.rows):
        raise UsageError(
            f"no row of {old.path} measured what this run measured",
            "give the same --method, --shape, --tokens, --threads, --isa and --routing as then",
        )
    report.rows = [
        _compared(row, by_key[row.key], tolerance) if row.key in by_key else row
        for row in report.rows
    ]
    return _notes(report, old, len(unknown), tolerance)


def _compared(row: Row, old: Row, tolerance: float) -> Row:
    ratio = row.median_us / old.median_us
    return replace(
        row, old_median_us=old.median_us, ratio=ratio, regressed=bool(ratio > 1 + tolerance)
    )


def _notes(report: Report, old: Old, unknown: int, tolerance: float) -> list[str]:
    notes = []
    if old.cpu != report.machine["cpu"]:
        notes.append(f"note: {old.path} is from another machine ({old.cpu or 'not named'})")
    if unknown:
        notes.append(f"note: {unknown} rows are not in {old.path}")
    slower = [row for row in report.rows if row.regressed]
    compared = sum(row.ratio is not None for row in report.rows)
    notes.append(f"{len(slower)} of {compared} rows are more than {tolerance:.0%} slower")
    if disturbed := sum(row.disturbed for row in slower):
        notes.append(f"note: {disturbed} of them were disturbed; measure again to be sure")
    return notes
