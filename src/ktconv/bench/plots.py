"""Two pictures of a report: the roofline, and speed over batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ktconv.bench.rows import Row
from ktconv.bench.run import Report
from ktconv.system.units import counted
from ktconv.writer.pictures import picture

_SIZE = (9.0, 6.0)


def plot(report: Report[Row], path: Path) -> None:
    """A file whose name starts with "sweep" shows tokens/s over tokens, any other the roofline."""
    with picture(path, _SIZE) as axes:
        if path.stem.lower().startswith("sweep"):
            _sweep(axes, report)
        else:
            _roofline(axes, report)


def _series(report: Report[Row]) -> dict[str, list[Row]]:
    """Label of a line -> its rows, fewest tokens first."""
    ours = [row for row in report.rows if row.engine == "ktconv"]
    several = {name for name in ("isa", "threads") if len({getattr(row, name) for row in ours}) > 1}
    shapes = len({row.shape["name"] for row in report.rows}) > 1
    lines: dict[str, list[Row]] = {}
    for row in sorted(report.rows, key=lambda row: row.tokens):
        label = row.method if row.engine == "ktconv" else f"{row.engine} {row.method}"
        label += f", {row.shape['name']}" if shapes else ""
        label += f", {row.isa}" if "isa" in several else ""
        label += f", {counted(row.threads, 'thread')}" if "threads" in several else ""
        lines.setdefault(label, []).append(row)
    return lines


def _draw(axes: Any, label: str, rows: list[Row], x: list[float], y: list[float]) -> None:
    """A line with a marker per row, hollow where the row was disturbed."""
    ours = rows[0].engine == "ktconv"
    line, marker = ("-", "o") if ours else (":", "s")
    (drawn,) = axes.plot(x, y, line, marker=marker, linewidth=1.2, label=label)
    for row, u, v in zip(rows, x, y, strict=True):
        if row.disturbed:
            axes.plot([u], [v], marker, color=drawn.get_color(), markerfacecolor="white")


def _sweep(axes: Any, report: Report[Row]) -> None:
    for label, rows in _series(report).items():
        tokens = [float(row.tokens) for row in rows]
        _draw(axes, label, rows, tokens, [row.tokens_per_s for row in rows])
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="tokens/s of one layer")
    measured = sorted({row.tokens for row in report.rows})
    axes.set_xticks(measured, [str(tokens) for tokens in measured])
    axes.set_xticks([], minor=True)
    _finish(axes, report)


def _roofline(axes: Any, report: Report[Row]) -> None:
    for label, rows in _series(report).items():
        x = [row.gops / max(row.weight_gb_s, 1e-9) for row in rows]
        _draw(axes, label, rows, x, [row.gops for row in rows])
        for index in {0, len(rows) - 1}:
            count = rows[index].tokens
            axes.annotate(
                f"M={count}",
                (x[index], rows[index].gops),
                xytext=(0, -11),
                textcoords="offset points",
                fontsize=6,
                ha="center",
                color="0.4",
            )
    _roofs(axes, report)
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="operations per byte of weights", ylabel="10^9 operations per second")
    _finish(axes, report)


def _roofs(axes: Any, report: Report[Row]) -> None:
    """The best limits of memory and units that were measured in this run."""
    low, high = axes.get_xlim()
    span = np.geomspace(max(low, 0.5), max(high, 1000.0), 400)
    for limit in report.limits:
        for unit, style in (("int8", "-"), ("bf16", "--")):
            roof = np.minimum(span * limit.read_gb_s, limit.peak(unit))
            name = f"{limit.isa} {unit}, {counted(limit.threads, 'thread')}: {limit.peak(unit):.0f}"
            axes.plot(span, roof, style, color="0.5", linewidth=1)
            axes.annotate(name, (span[-1], roof[-1]), ha="right", va="bottom", fontsize=8)
        name = f"memory, {counted(limit.threads, 'thread')}: {limit.read_gb_s:.0f} GB/s"
        # Along the line and above it: points and their names are below.
        above = 1.12 * limit.read_gb_s
        axes.text(
            span[0],
            span[0] * above,
            name,
            fontsize=8,
            rotation=np.degrees(np.arctan(above)),
            rotation_mode="anchor",
            transform_rotates_text=True,
        )


def _finish(axes: Any, report: Report[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    shapes = ", ".join(dict.fromkeys(row.shape["name"] for row in report.rows))
    hollow = "; hollow: disturbed" if any(row.disturbed for row in report.rows) else ""
    axes.set_title(f"{shapes} on {report.machine['cpu']}{hollow}", fontsize=10)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8, loc="upper left")
