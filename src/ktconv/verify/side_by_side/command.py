"""`ktconv compare` behind its options: facts, a table, the report and the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.source.model_source import ModelSource
from ktconv.system.text import Notify, printable, table_lines
from ktconv.system.units import counted, format_size
from ktconv.verify.command import in_json, report_file
from ktconv.verify.findings import Progression
from ktconv.verify.report.outputs import ERRORS, deepest
from ktconv.verify.report.values import records
from ktconv.verify.side_by_side.request import CompareRequest
from ktconv.verify.side_by_side.run import compare
from ktconv.writer.option_files import check_written
from ktconv.writer.pictures import picture, picture_file

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
    yield from table_lines(table, left=range(2))
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


# ---- the picture of --plot -------------------------------------------------------------

_SIZE = (11.0, 5.0)
_BESIDE = (5, 5), (5, -12)  # points from a marker to its label
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))


def plot(rows: Sequence[Facts], path: Path) -> None:
    """Left: error over size; right: tokens/s over size, a line for each number of tokens."""
    measure = deepest(records(rows)) or "relative_rms_error"
    unit, divisor = _unit(max(row["bytes"] for row in rows))
    with picture(path, _SIZE, 1, 2) as (errors, speeds):
        for axes in (errors, speeds):
            axes.margins(x=0.2, y=0.1)  # room for the names
        for number, row in enumerate(sorted(rows, key=lambda one: one["bytes"])):
            size = row["bytes"] / divisor
            if isinstance(row[measure], float) and not row["is_source"]:
                errors.scatter(size, row[measure], marker="o")
                _label(errors, row["name"], size, row[measure], number)
        errors.set_xlabel(f"size, {unit}")
        errors.set_ylabel(ERRORS[measure])
        errors.set_ylim(bottom=0)
        errors.grid(alpha=0.3)
        for tokens in dict.fromkeys(n for row in rows for n in row["tokens_per_s"]):
            here = sorted(
                (row["bytes"] / divisor, row["tokens_per_s"][tokens], row["name"])
                for row in rows
                if tokens in row["tokens_per_s"]
            )
            speeds.plot(
                [x for x, _, _ in here],
                [y for _, y, _ in here],
                "o-",
                label=counted(int(tokens), "token"),
            )
            for number, (x, y, name) in enumerate(here):
                _label(speeds, name, x, y, number)
        speeds.set_xlabel(f"size, {unit}")
        speeds.set_ylabel("tokens/s of all MoE layers")
        speeds.set_yscale("log")
        speeds.grid(alpha=0.3)
        if speeds.get_legend_handles_labels()[0]:
            speeds.legend(fontsize=8)


def _unit(nbytes: int) -> tuple[str, float]:
    """The largest unit of which there is one, for the axis of sizes."""
    return next((one for one in _UNITS if nbytes >= one[1]), _UNITS[-1])


def _label(axes: Any, name: str, x: float, y: float, number: int) -> None:
    """To the right of a marker, so that neither hides the other: above it and below it in turn, for
    neighbours are often close."""
    axes.annotate(name, (x, y), _BESIDE[number % 2], textcoords="offset points", fontsize=8)
