"""A new report against an old one, row by row."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import fields, replace

from ktconv.bench.rows import DIMENSIONS, Key, Row
from ktconv.bench.run import SCHEMA, Report
from ktconv.errors import UsageError
from ktconv.system.regular_files import read_given
from ktconv.system.units import counted

_WORDS, _COUNTS = ("method", "routing", "isa", "engine"), ("tokens", "threads", "parts")
_WRITTEN = "write it with --format json"
_NAMED = 3  # rows that a note lists


class Baseline(Struct, frozen=True):
    """The part of an old report that is compared."""

    path: Path
    cpu: str
    rows: list[Row]

    def like(self, row: Row) -> Row | None:
        """The row of the same configuration. If there are several, because the key does not include
        name and activation of a shape, the one with the same name."""
        same = [old for old in self.rows if old.key == row.key]
        named = [old for old in same if old.shape["name"] == row.shape["name"]]
        return named[0] if named else same[0] if len(same) == 1 else None

    def expect_any(self, keys: Iterable[Key]) -> None:
        """Raises UsageError, before hours of measuring, if nothing can be compared after them."""
        if not {old.key for old in self.rows}.intersection(keys):
            raise UsageError(
                f"no row of {self.path} measured what this run would measure",
                "give the same --method, --shape, --tokens, --threads, --isa and --routing as then",
            )


def read_report(path: Path) -> Baseline:
    """Raises UsageError if the file is no report of `--format json`."""
    data = read_given(path, "--compare", _WRITTEN)
    try:
        content = json.loads(data.decode())
    except ValueError:
        raise UsageError(f"{path} is not JSON", _WRITTEN) from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", _WRITTEN) from None
    if not isinstance(content, dict) or "rows" not in content or "limits" not in content:
        raise UsageError(f"{path} is not a report of ktconv bench", _WRITTEN)
    if content.get("mode") == "sft":
        raise UsageError(
            f"{path} is a report of --mode sft, which is not compared",
            "give a report of --mode infer",
        )
    if content.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} has schema {content.get('schema')}, this ktconv reads {SCHEMA}",
            "measure again with this version",
        )
    try:
        machine = content.get("machine", {})
        rows = [_row(row) for row in content["rows"]]
        _expect_single(rows)
        return Baseline(path, str(machine.get("cpu", "")), rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is not a complete report: {error}", _WRITTEN) from None


def _expect_single(rows: list[Row]) -> None:
    seen = set()
    for row in rows:
        case = (row.key, row.shape["name"])
        if case in seen:
            raise ValueError(f"two rows measured the same, {_words(row)}")
        seen.add(case)


def _row(facts: dict[str, Any]) -> Row:
    """Unknown names are ignored, as newer versions add some; names with a default are optional."""
    known = {field.name for field in fields(Row)}
    needed = {field.name for field in fields(Row) if field.required}
    if missing := needed - facts.keys():
        raise KeyError(min(missing))
    row = Row(**{name: value for name, value in facts.items() if name in known})
    for name in DIMENSIONS:
        _expect(f"shape.{name}", row.shape[name], int)
    _expect("shape.name", row.shape["name"], str)
    for name in _WORDS:
        _expect(name, getattr(row, name), str)
    for name in _COUNTS:
        _expect(name, getattr(row, name), int)
    _expect("layer", row.layer, int, type(None))
    _expect("median_us", row.median_us, int, float)
    if not 0 < row.median_us <= sys.float_info.max:
        raise ValueError("a median that is not a number above 0")
    return replace(row, median_us=float(row.median_us))


def _expect(name: str, value: object, *kinds: type) -> None:
    """TypeError unless `value` has exactly one of these types: true does not count as a number."""
    if type(value) not in kinds:
        raise TypeError(f"{name} is of type {type(value).__name__}")


def compare(report: Report[Row], old: Baseline, tolerance: float) -> list[str]:
    """Add ratios to the rows of the report; returns notes for the user."""
    pairs = [(row, old.like(row)) for row in report.rows]
    report.rows = [_compared(row, then, tolerance) if then else row for row, then in pairs]
    found = {id(then) for _, then in pairs}
    missing = [row for row in old.rows if id(row) not in found]
    return _notes(report, old, missing, tolerance)


def _compared(row: Row, old: Row, tolerance: float) -> Row:
    ratio = row.median_us / old.median_us
    return replace(
        row, old_median_us=old.median_us, ratio=ratio, regressed=bool(ratio > 1 + tolerance)
    )


def _notes(report: Report[Row], old: Baseline, missing: list[Row], tolerance: float) -> list[str]:
    notes = []
    if old.cpu != report.machine["cpu"]:
        notes.append(f"note: {old.path} is from another machine ({old.cpu or 'not named'})")
    compared = sum(row.ratio is not None for row in report.rows)
    if unknown := len(report.rows) - compared:
        notes.append(f"note: {unknown} rows are not in {old.path}")
    if missing:
        some = "; ".join(map(_words, missing[:_NAMED])) + ("; ..." if missing[_NAMED:] else "")
        notes.append(f"note: {len(missing)} rows of {old.path} were not measured: {some}")
    slower = [row for row in report.rows if row.regressed]
    notes.append(f"{len(slower)} of {compared} rows are more than {tolerance:.0%} slower")
    if disturbed := sum(row.disturbed for row in slower):
        notes.append(f"note: {disturbed} of them were disturbed; measure again to be sure")
    return notes


def _words(row: Row) -> str:
    layer = "" if row.layer is None else f" layer {row.layer}"
    return (
        f"{row.engine} {row.method} {row.shape['name']}{layer}, {row.routing}, "
        f"{counted(row.tokens, 'token')}, {counted(row.threads, 'thread')}, {row.isa}"
    )
