"""Two pictures of a report: the roofline, and speed over batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ktconv.bench.rows import Row
from ktconv.bench.run import Report
from ktconv.errors import ResourceError, UsageError

_SIZE = (9.0, 6.0)
_DPI = 120


def check_plot(path: Path) -> None:
    """Before hours are spent measuring: can this picture be drawn at all?"""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path} is no picture", "end it with .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib", "pip install 'ktconv[plot]'") from None


def plot(report: Report, path: Path) -> None:
    """A file whose name starts with "sweep" shows tokens/s over tokens, any other the roofline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    if path.stem.lower().startswith("sweep"):
        _sweep(axes, report)
    else:
        _roofline(axes, report)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _series(report: Report) -> dict[str, list[Row]]:
    """Rows that belong on one line, by what tells the lines apart."""
    several = {
        name for name in ("isa", "threads") if len({getattr(row, name) for row in report.rows}) > 1
    }
    shapes = len({row.shape["name"] for row in report.rows}) > 1
    lines: dict[str, list[Row]] = {}
    for row in report.rows:
        label = row.method
        label += f", {row.shape['name']}" if shapes else ""
        label += f", {row.isa}" if "isa" in several else ""
        label += f", {row.threads} threads" if "threads" in several else ""
        lines.setdefault(label, []).append(row)
    return lines


def _sweep(axes: Any, report: Report) -> None:
    for label, rows in _series(report).items():
        ordered = sorted(rows, key=lambda row: row.tokens)
        x = [row.tokens for row in ordered]
        axes.plot(x, [row.tokens_per_s for row in ordered], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="tokens/s of one layer")
    _finish(axes, report)


def _roofline(axes: Any, report: Report) -> None:
    for label, rows in _series(report).items():
        x = [row.gops / max(row.weight_gb_s, 1e-9) for row in rows]
        axes.plot(x, [row.gops for row in rows], "o", label=label)
    low, high = axes.get_xlim()
    span = np.geomspace(max(low, 0.5), max(high, 1000.0), 200)
    for limit in report.limits:
        for unit, style in (("int8", "-"), ("bf16", "--")):
            roof = np.minimum(span * limit.read_gb_s, limit.peak(unit))
            name = f"{limit.isa} {unit}, {limit.threads} threads"
            axes.plot(span, roof, style, color="0.5", linewidth=1)
            axes.annotate(name, (span[-1], roof[-1]), ha="right", va="bottom", fontsize=8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte of weights",
        ylabel="10^9 operations per second",
    )
    _finish(axes, report)


def _finish(axes: Any, report: Report) -> None:
    shapes = ", ".join(dict.fromkeys(row.shape["name"] for row in report.rows))
    axes.set_title(f"{shapes} on {report.machine['cpu']}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
