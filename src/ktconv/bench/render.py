"""Rows as text: a table for people, Markdown, CSV, JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from ktconv.bench.rows import Row
from ktconv.bench.run import Report

FORMATS = ("table", "markdown", "json", "jsonl", "csv")

_HEADS = (
    "shape",
    "method",
    "isa",
    "threads",
    "tokens",
    "median us",
    "p10-p90",
    "tokens/s",
    "GB/s",
    "GOPS",
    "of limit",
    "tokens/expert",
    "error",
)
_LEFT = 3  # columns that are words


def render(report: Report, form: str) -> str:
    """The report in one of FORMATS, without a newline at its end."""
    if form == "json":
        return json.dumps(report.facts(), indent=1)
    if form == "jsonl":
        return "\n".join(json.dumps(row.facts()) for row in report.rows)
    if form == "csv":
        return _csv(report.rows)
    cells = [_cells(row) for row in report.rows]
    return _markdown(cells) if form == "markdown" else _table(cells)


def _cells(row: Row) -> tuple[str, ...]:
    mark = " !" if row.disturbed else ""
    return (
        row.shape["name"],
        row.method,
        row.isa,
        str(row.threads),
        str(row.tokens),
        f"{row.median_us:.0f}{mark}",
        f"{row.p10_us:.0f}-{row.p90_us:.0f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.weight_gb_s:.1f}",
        f"{row.gops:.0f}",
        f"{row.share_of_bound:.0%} {row.bound}",
        f"{row.tokens_per_expert:.1f}",
        f"{row.relative_error:.1e}",
    )


def _table(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(_HEADS, *cells, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if i < _LEFT else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (_HEADS, *cells)
    ]
    if any(" !" in line[5] for line in cells):
        lines.append("! something else ran on the machine meanwhile, or times vary widely")
    return "\n".join(lines)


def _markdown(cells: Sequence[tuple[str, ...]]) -> str:
    rule = ["---" if i < _LEFT else "---:" for i in range(len(_HEADS))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (_HEADS, rule, *cells))


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    flat = [row.facts() | {f"shape_{k}": v for k, v in row.shape.items()} for row in rows]
    names = [name for name in flat[0] if name != "shape"] if flat else []
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().rstrip("\n")
