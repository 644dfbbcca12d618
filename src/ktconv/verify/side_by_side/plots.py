"""A picture of a comparison: what a size costs in error, and what it brings in speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.system.units import counted
from ktconv.verify.report.outputs import ERRORS, deepest
from ktconv.verify.report.values import records
from ktconv.writer.pictures import picture

_SIZE = (11.0, 5.0)
Facts = Mapping[str, Any]
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
                _name(errors, row["name"], size, row[measure], number)
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
                _name(speeds, name, x, y, number)
        speeds.set_xlabel(f"size, {unit}")
        speeds.set_ylabel("tokens/s of all MoE layers")
        speeds.set_yscale("log")
        speeds.grid(alpha=0.3)
        if speeds.get_legend_handles_labels()[0]:
            speeds.legend(fontsize=8)


def _unit(nbytes: int) -> tuple[str, float]:
    """The largest unit of which there is one, for the axis of sizes."""
    return next((one for one in _UNITS if nbytes >= one[1]), _UNITS[-1])


def _name(axes: Any, name: str, x: float, y: float, number: int) -> None:
    """To the right of a marker, so that neither hides the other: above it and below it in turn, for
    neighbours are often close."""
    axes.annotate(name, (x, y), _BESIDE[number % 2], textcoords="offset points", fontsize=8)
