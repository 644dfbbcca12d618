"""What does not hold, the worst first, and notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.verify.report.html import (
    Column,
    escape,
    items,
    key,
    number,
    show,
    show_id,
    show_path,
    table,
)
from ktconv.verify.report.parts import LEVELS, as_section


def failure_count(result: Mapping[str, Any]) -> int:
    """As the result says, but no fewer than it lists."""
    count = number(result.get("failure_count"))
    listed = len(items(result.get("failures")))
    return max(int(count), listed) if count is not None and math.isfinite(count) else listed


_PLACE = ("file", "tensor")
_FAILURE_COLUMNS = (
    Column("what", lambda failure: failure, lambda failure: _what(failure), text=True),
    Column("layer", key("layer"), show_id),
    Column("expert", key("expert"), show_id),
    Column("projection", key("projection"), text=True),
    Column("part", key("part"), show_id),
    Column("row", key("row"), show_id),
    Column("column", key("column"), show_id),
    Column("source value", key("source_value")),
    Column("value", key("value")),
    Column("steps off", key("steps")),
)
_SHOWN = {
    *_PLACE,
    *("level", "check", "message", "layer", "expert", "projection", "part", "row", "column"),
    *("source_value", "value", "steps"),
}


def _what(failure: Mapping[str, Any]) -> str:
    """The message, the place below it, and whatever else the failure tells."""
    places = [show_path(failure[name]) for name in _PLACE if failure.get(name) is not None]
    others = [
        f'<span class="code">{escape(name)}: {show_id(value)}</span>'
        for name, value in failure.items()
        if name not in _SHOWN and value is not None
    ]
    return f'<div class="what">{show(failure.get("message"))}{"".join(places + others)}</div>'


def _badness(failure: Mapping[str, Any]) -> float:
    """How far off, in steps or else in value; what is no number is worst, the unknown last."""
    steps = number(failure.get("steps"))
    if steps is not None:
        return math.inf if math.isnan(steps) else abs(steps)
    source, value = number(failure.get("source_value")), number(failure.get("value"))
    if value is None:
        return -1.0
    distance = abs(value - (source or 0.0))
    return math.inf if math.isnan(distance) else distance


def _groups(failures: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """By level and check. Lower levels first: what fails there explains much of the rest."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for failure in failures:
        kind = (str(failure.get("level")), str(failure.get("check")))
        groups.setdefault(kind, []).append(failure)
    order = {level: place for place, level in enumerate(LEVELS)}
    ranked = sorted(
        groups.items(), key=lambda item: (order.get(item[0][0], len(order)), -len(item[1]), item[0])
    )
    return [sorted(group, key=_badness, reverse=True) for _, group in ranked]


def failures_section(result: Mapping[str, Any]) -> str:
    failures = [
        item if isinstance(item, Mapping) else {"message": item}
        for item in items(result.get("failures"))
    ]
    count = failure_count(result)
    if not count:
        return ""
    parts = []
    for group in _groups(failures):
        level, check = group[0].get("level"), group[0].get("check")
        parts.append(
            f'<h3 class="group"><span>{show(check)}</span><span class="pill">{show(level)}</span>'
            f'<span class="soft">{len(group):,}</span></h3>\n'
        )
        parts.append(table(_FAILURE_COLUMNS, group, f"failures of {check}"))
    lead = "Grouped by check, the worst of each group first."
    if count > len(failures):
        lead += f" {len(failures):,} of {count:,} are listed."
    pill = f'<span class="pill fail">{count:,}</span>'
    return as_section("failures", "Failures", lead, "".join(parts), pill)


def notes_section(result: Mapping[str, Any]) -> str:
    notes = items(result.get("notes"))
    if not notes:
        return ""
    listed = "".join(f"<li>{show(note)}</li>\n" for note in notes)
    return as_section("notes", "Notes", "", f'<ul class="notes">\n{listed}</ul>\n')
