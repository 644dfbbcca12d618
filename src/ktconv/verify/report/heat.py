"""The error of every expert, a cell per layer and expert, as templates/charts.html draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ktconv.verify.report.charts import WIDTH, Scale, drawable

SHADES = 16  # colours in report.css
RAMP = 18 * SHADES  # the width of all of them in the legend
_LOG_SHADES_FROM = 4.0  # from this ratio on, so that one bad expert leaves others distinct
_TOP, _LEFT, _RIGHT, _BOTTOM = 4, 58, 8, 44


def heat_map(labels: Sequence[str], rows: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """A cell per layer and expert, and what the legend needs; nothing where there are none."""
    columns = max(map(len, rows), default=0)
    if not columns:
        return {}
    cell = min((WIDTH - _LEFT - _RIGHT) / columns, 46.0)
    height = min(max(440 / len(rows), 7.0), 26.0)
    scale = Scale.around((v for row in rows for v in row if v), log_from=_LOG_SHADES_FROM)
    gap = 2.0 if cell >= 12 else 0.6 if cell >= 6 else -0.4  # tiny cells overlap: no seams
    tops = [_TOP + index * height for index in range(len(rows))]
    base = _TOP + len(rows) * height
    total = max(_LEFT + columns * cell + _RIGHT, 620)
    starts = [f"{expert * cell:.2f}" for expert in range(columns)]
    cells = [
        [(x, _shade_of(value, scale), value) for x, value in zip(starts, row, strict=False)]
        for row in rows
    ]
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 1 << 40) if step * cell >= 30)
    return {
        "left": _LEFT,
        "view": f"{total:g} {base + _BOTTOM:g}",
        "widths": f"max-width:{total:g}px;min-width:{min(total, 900):g}px",
        "cell": f"{cell - gap:.2f}",
        "height": f"{height - (2 if height >= 12 else 1):.4g}",
        "rows": [(f"{y:g}", *row) for y, *row in zip(tops, labels, cells, strict=True)],
        "layers": _layer_names(labels, tops, height),
        "experts": [
            (f"{_LEFT + expert * cell + (cell - gap) / 2:.1f}", expert)
            for expert in range(0, columns, every)
        ],
        "middle": f"{_TOP + len(labels) * height / 2:g}",
        "centre": f"{_LEFT + columns * cell / 2:.1f}",
        "below": f"{base + 15:g}",
        "bottom": f"{base + 36:g}",
        "ring": _ring(rows, cell, gap, height),
        "log": scale.log,
        "ramp": [
            (f"{share * RAMP:g}", anchor, float(f"{scale.value(share):.3g}"))
            for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end"))
        ],
        "shades": {shade for row in cells for _, shade, _ in row},
    }


def _shade_of(value: float | None, scale: Scale) -> str:
    if value is None:
        return "m"
    if not drawable(value):
        return "x"
    return f"c{min(int(scale.share(value) * SHADES), SHADES - 1)}" if value else "z"


def _layer_names(
    labels: Sequence[str], tops: Sequence[float], height: float
) -> list[tuple[str, str]]:
    """Places and labels of as many layers as fit."""
    least = math.ceil(15 / height)
    every = next((step for step in (1, 2, 5, 10, 20, 50) if step >= least), least)
    return [
        (f"{top + 0.5 * height - 1:g}", label[:6])
        for index, (top, label) in enumerate(zip(tops, labels, strict=True))
        if (int(label) if label.isdecimal() and len(label) < 9 else index) % every == 0
    ]


def _ring(
    rows: Sequence[Sequence[float | None]], cell: float, gap: float, height: float
) -> tuple[str, ...] | None:
    """x, y, width and height of a frame around the highest value, hard to find in a large map."""
    found = (
        (value, -index, -expert)
        for index, row in enumerate(rows)
        for expert, value in enumerate(row)
        if value and drawable(value)
    )
    highest = max(found, default=None)
    if highest is None:
        return None
    _, index, expert = highest
    x, y = _LEFT - expert * cell - 3, _TOP - index * height - 3  # both are negative
    return f"{x:.1f}", f"{y:g}", f"{cell - gap + 6:.1f}", f"{height + 4.5:g}"
