"""`ktconv compare` behind its options: facts, a table, the report and the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.source.model_source import ModelSource
from ktconv.system.text import Notify, printable
from ktconv.system.units import format_size
from ktconv.verify.command import in_json, report_file
from ktconv.verify.findings import Progression
from ktconv.verify.side_by_side.plots import plot
from ktconv.verify.side_by_side.request import CompareRequest
from ktconv.verify.side_by_side.run import compare
from ktconv.writer.option_files import check_written
from ktconv.writer.pictures import picture_file

Facts = Mapping[str, Any]
_NOTHING = "-"


def run(
    request: CompareRequest,
    progression: Progression,
    notify: Notify,
    report: Path | None = None,
    picture: Path | None = None,
) -> tuple[dict[str, Any], list[str], bool]:
    """Facts, lines for people, and whether all checks passed. Raises KtconvError."""
    written = (
        None if report is None else report_file(report),
        None if picture is None else picture_file(picture),
    )
    check_written(written, (*ModelSource.of(request.source).files(), *request.outputs))
    found = compare(request, progression, notify)
    facts = in_json(found.facts())
    lines = list(lines_of(facts))
    if report is not None:
        from ktconv.verify.report import render_report

        report_file(report).write(render_report(facts).encode())
    if picture is not None:
        plot(facts["rows"], picture)
    return facts, lines, found.passed


def lines_of(facts: Facts) -> Iterator[str]:
    """The table, failures, and what another output makes superfluous."""
    rows = facts["rows"]
    tokens = list(dict.fromkeys(n for row in rows for n in row["tokens_per_s"]))
    head = ["", "method", "size", "bits", "weights", "outputs", "KL", "perplexity", "top-1"]
    head += [f"tok/s at {n}" for n in tokens]
    table = [head, *(_cells(row, tokens) for row in rows)]
    yield from _aligned(table)
    for row in rows:
        if row["not_measured"] and tokens:
            yield f"{_name(row)}: speed not measured: {row['not_measured']}"
        for failure in row["failures"][:3]:
            yield f"{_name(row)} FAILED: {failure}"
    names = {row["path"]: _name(row) for row in rows}
    for path, other in facts["dominated"].items():
        yield f"{names[path]} is not smaller than {names[other]}, and not nearer to the source"


def _name(row: Facts) -> str:
    return printable(str(row["name"]))


def _cells(row: Facts, tokens: Sequence[str]) -> list[str]:
    cells = [_name(row), str(row["method"]), format_size(row["bytes"]), f"{row['bits']:.3f}"]
    for name, form in (
        ("relative_rms_error", "{:.4f}"),
        ("output_error", "{:.4f}"),
        ("kl_mean", "{:.5f}"),
        ("perplexity_increase", "{:+.2%}"),
        ("top1_agreement", "{:.1%}"),
    ):
        value = row[name]
        cells.append(form.format(value) if isinstance(value, (int, float)) else _NOTHING)
    rates = row["tokens_per_s"]
    return cells + [f"{rates[n]:.1f}" if n in rates else _NOTHING for n in tokens]


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first two columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            f"{cell:<{width}}" if number < 2 else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
