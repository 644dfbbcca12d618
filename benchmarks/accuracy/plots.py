"""Plots of the results, as SVG files that are equal for equal results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.results import Row
from benchmarks.accuracy.tables import models, ratio_of, usual, with_outliers
from benchmarks.accuracy.variants import BASE, VARIANTS

_SIZE = (8.0, 4.2)
_OFFSET = 0.12  # between the points of two models


def write_plots(folder: Path, rows: Sequence[Row]) -> None:
    """kl.svg, outliers.svg and layers.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: [name] for name in models(rows)}
    int4 = [key for key, one in VARIANTS.items() if one.format.key != "int8"]
    figure(folder / "kl.svg", "mean KL / mean KL of amax", _points(rows, plain, int4, _ratio(rows)))
    figure(
        folder / "outliers.svg",
        "mean KL / mean KL of amax, each seed",
        _points(rows, with_outliers(rows), int4, _ratio(rows)),
    )
    figure(folder / "layers.svg", "relative error of layers", _points(rows, plain, int4, _layers))


def _ratio(rows: Sequence[Row]) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        if row["variant"] in BASE.values():
            return 1.0
        ratio = ratio_of(row, rows)
        return None if ratio is None else ratio.value

    return value


def _layers(row: Row) -> float:
    errors = row["values"]["layer_errors"]
    return float(sum(errors) / len(errors))


Points = Mapping[str, Sequence[tuple[str, float]]]  # by model: labels of variants and values


def _points(
    rows: Sequence[Row],
    groups: Mapping[str, Sequence[str]],
    variants: Sequence[str],
    value: Callable[[Row], float | None],
) -> Points:
    """Of the models of each group, in the order of the variants."""
    return {
        group: [
            (VARIANTS[key].label, found)
            for key in variants
            for name in names
            if (row := usual(rows, name).get(key)) is not None and (found := value(row)) is not None
        ]
        for group, names in groups.items()
    }


def figure(path: Path, axis: str, points: Points) -> None:
    """One column per variant, one colour per model, values on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "ktconv", "svg.fonttype": "none"})
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    labels = list(dict.fromkeys(label for series in points.values() for label, _ in series))
    for number, (model, series) in enumerate(points.items()):
        shift = _OFFSET * (number - (len(points) - 1) / 2)
        places = [labels.index(label) + shift for label, _ in series]
        axes.scatter(places, [value for _, value in series], s=28, label=model)
    _finish(axes, labels, axis)
    drawn.savefig(path, metadata={"Date": None})
    pyplot.close(drawn)


def _finish(axes: Any, labels: Sequence[str], axis: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(labels)), labels, rotation=25, ha="right")
    axes.set_ylabel(axis)
    axes.grid(axis="y", which="major", alpha=0.3)
    axes.legend()
