"""Rows as text: a table for people, Markdown, CSV, JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

from ktconv.bench.rows import LOCAL, Row
from ktconv.bench.run import AnyRow, Report, told_of_nodes
from ktconv.system.text import table_lines

FORMATS = ("table", "markdown", "json", "jsonl", "csv")

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "shape": lambda row: str(row.shape["name"]),
    "engine": lambda row: row.engine,
    "method": lambda row: row.method,
    "isa": lambda row: f"{row.isa} ({row.detail})" if row.detail else row.isa,
    "threads": lambda row: str(row.threads),
    "tokens": lambda row: str(row.tokens),
    "experts": lambda row: f"{row.distinct_experts:.0f} x {row.tokens_per_expert:.1f}",
    "median us": lambda row: f"{row.median_us:.0f}",
    "p10-p90": lambda row: f"{row.p10_us:.0f}-{row.p90_us:.0f}",
    "tokens/s": lambda row: f"{row.tokens_per_s:.0f}",
    "GB/s": lambda row: f"{row.weight_gb_s:.1f}",
    "GOPS": lambda row: f"{row.gops:.0f}",
    "of memory": lambda row: f"{row.share_of_memory:.0%}",
    "of peak": lambda row: f"{row.share_of_peak:.0%} {row.unit}",
    "local": lambda row: local_text(row),
    "error": lambda row: f"{row.relative_error:.1e}",
    "time / ours": lambda row: "-" if row.times_ours is None else f"{row.times_ours:.2f}",
    "": lambda row: _marks(row),
    "before us": lambda row: "-" if row.old_median_us is None else f"{row.old_median_us:.0f}",
    "ratio": lambda row: _ratio(row),
}
WORDS = {"shape", "engine", "method", "isa", ""}
DISTURBED = "! disturbed: other work on the machine, times or limits that vary widely"
REMOTE = "r remote: threads read weights from the memory of another NUMA node"
_LEGEND = {
    "!": DISTURBED,
    "c": "c the weights are so few that they come from the cache, not from memory",
    "r": REMOTE,
}


def _marks(row: Row) -> str:
    marks = {"!": row.disturbed, "c": row.in_cache, "r": is_remote(row)}
    return "".join(mark for mark, has in marks.items() if has)


class _Placed(Protocol):
    @property
    def local_share(self) -> float | None: ...


def is_remote(row: _Placed) -> bool:
    """Whether part of the weights lies on other NUMA nodes than the one that reads them."""
    return row.local_share is not None and row.local_share < LOCAL


def local_text(row: _Placed) -> str:
    """Share of the weights' pages that are local, for a table."""
    return "-" if row.local_share is None else f"{row.local_share:.0%}"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "new"
    return f"{row.ratio:.2f}{' SLOWER' if row.regressed else ''}"


def render(report: Report[Row], form: str) -> str:
    """The report in one of FORMATS, without a newline at its end."""
    columns = {name: _COLUMNS[name] for name in _wanted(report)}
    notes = [] if report.nodes is None else told_of_nodes(report.nodes)
    return render_report(report, form, columns, _marks, _LEGEND, *notes)


def render_report(
    report: Report[AnyRow],
    form: str,
    columns: Mapping[str, Callable[[AnyRow], str]],
    marks: Callable[[AnyRow], str],
    legend: Mapping[str, str],
    *notes: str,
) -> str:
    """The report with these `columns`. Below a table for people stand `notes`, and the lines of
    `legend` for the marks that rows have."""
    cells = [[text(row) for text in columns.values()] for row in report.rows]
    facts = report.facts()
    text = render_rows(form, facts, facts["rows"], list(columns), cells, WORDS)
    if form not in ("table", "markdown"):
        return text
    used = {mark for row in report.rows for mark in marks(row)}
    below = [*notes, *(line for mark, line in legend.items() if mark in used)]
    return "\n".join([text, *([""] if below else []), *below])


def render_rows(
    form: str,
    document: Mapping[str, Any],
    facts: Sequence[dict[str, Any]],
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    words: Set[str],
) -> str:
    """`document` as JSON, `facts` as JSON lines or CSV, or a table of `cells`, whose columns have
    `names`; those in `words` are not numbers."""
    if form == "json":
        return json.dumps(document, indent=1)
    if form == "jsonl":
        return "\n".join(map(json.dumps, facts))
    if form == "csv":
        return _csv([_flat(row) for row in facts])
    lines, left = [names, *cells], [number for number, name in enumerate(names) if name in words]
    return _markdown(lines, left) if form == "markdown" else "\n".join(table_lines(lines, left))


def _wanted(report: Report[Row]) -> list[str]:
    """Columns that say something in this report."""
    rows, useless = report.rows, set()
    if all(row.engine == "ktconv" for row in rows):
        useless |= {"engine", "time / ours"}
    if not any(map(_marks, rows)):
        useless.add("")
    if all(row.ratio is None for row in rows):
        useless |= {"before us", "ratio"}
    return [name for name in _COLUMNS if name not in useless]


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with {"shape_hidden": 8} in place of {"shape": {"hidden": 8}}, after what is plain."""
    inner = {name: value for name, value in facts.items() if isinstance(value, dict)}
    plain = {name: value for name, value in facts.items() if name not in inner}
    return plain | {
        f"{of}_{name}": one for of, value in inner.items() for name, one in value.items()
    }


def _markdown(lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    head, *rest = lines
    rule = ["---" if number in left else "---:" for number in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rest))


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """A row of names that any of `rows` has."""
    out, names = io.StringIO(), dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
