"""A picture of a plan: the load of ranks and of places, before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktconv.plan.planned import Planned
from ktconv.system.arrays import F64
from ktconv.writer.pictures import picture

_SIZE = (11.0, 7.0)
_COLOURS = "viridis"
_MOST_LINES = 16  # more would hide what is between them
Places = Sequence[Sequence[int]]
Loaded = tuple[Places, F64]  # ids by rank, and the load of each place of an expert


def plot(planned: Planned, path: Path) -> None:
    """Layers from top to bottom; above their ranks, below the places of experts on these. Left: the
    experts on GPUs linear and without copies; right: as planned. 1 is the mean on the left."""
    before = [(one.before, one.load) for one in planned.layers]
    after = [(one.places, one.load / np.maximum(one.copies, 1)) for one in planned.layers]
    with picture(path, _SIZE, 2, 2) as axes:
        _pair(axes[0], planned, _relative(before, after, _of_ranks), "rank")
        _pair(axes[1], planned, _relative(before, after, _of_places), "expert, by rank")
        for one, layers in ((axes[1][0], before), (axes[1][1], after)):
            _separate_ranks(one, [places for places, _ in layers])
        axes[0][0].set_title("before: linear, no copies", fontsize=10)
        if planned.request.load is None:
            axes[0][0].figure.suptitle("without --load: every expert counts the same", fontsize=10)
        axes[0][1].set_title(f"after: {planned.request.placed.replace('_', ' ')}", fontsize=10)


def _of_ranks(places: Places, load: F64) -> F64:
    return np.array([load[list(rank)].sum() for rank in places])


def _of_places(places: Places, load: F64) -> F64:
    return load[[expert for rank in places for expert in rank]]


def _relative(
    before: Sequence[Loaded], after: Sequence[Loaded], loads: Callable[[Places, F64], F64]
) -> list[F64]:
    """Two tables of loads, by layer, over the means of the first."""
    rows = [[loads(*one) for one in layers] for layers in (before, after)]
    means = [row.mean() if row.any() else 1.0 for row in rows[0]]
    return [_table([row / mean for row, mean in zip(side, means, strict=True)]) for side in rows]


def _table(rows: Sequence[F64]) -> F64:
    """Table of rows, with nothing behind those of layers that have less."""
    table = np.full((len(rows), max(1, *map(len, rows))), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


def _pair(axes: Sequence[Any], planned: Planned, tables: Sequence[F64], label: str) -> None:
    """Two panels with one scale of colours."""
    top = max(1.0, *(float(np.nanmax(table, initial=0.0)) for table in tables))
    for one, table in zip(axes, tables, strict=True):
        drawn = one.imshow(
            table, aspect="auto", interpolation="nearest", cmap=_COLOURS, vmin=0, vmax=top
        )
        _finish(one, planned, table.shape[1], label)
    axes[0].figure.colorbar(drawn, ax=list(axes), label="load / mean before")


def _separate_ranks(axes: Any, layers: Sequence[Places]) -> None:
    """Lines between a few ranks, where all layers have as many experts on each."""
    counts = {tuple(map(len, places)) for places in layers}
    if len(counts) == 1 and len(layers[0]) <= _MOST_LINES:
        for end in np.cumsum(counts.pop())[:-1]:
            axes.axvline(end - 0.5, color="white", linewidth=1)


def _finish(axes: Any, planned: Planned, columns: int, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    layers = [one.layer.index for one in planned.layers]
    step = -(-len(layers) // 12)
    axes.set_yticks(range(0, len(layers), step), [str(n) for n in layers[::step]])
    axes.set(xlabel=label, ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(columns, 9)))
