"""Points with names over two measures. Computes what templates/charts.html draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ktconv.verify.report.charts import Scale, marker, points

WIDTH, HEIGHT = 1120, 380
LEFT, RIGHT, TOP, BOTTOM = 86, 160, 16, 46  # names stand to the right of their points
_ROOM = 15.0  # between names, one above the other


class Point(Struct, frozen=True):
    """`style`: points of equal ones belong together."""

    name: str
    x: float
    y: float
    style: int = 0


def scatter_chart(
    given: Sequence[Point], x_name: str, y_name: str, legend: Sequence[str] = ()
) -> dict[str, Any] | None:
    """`legend`: the name of each style. None without points."""
    if not given:
        return None
    across = Scale.around([one.x for one in given], narrow=0.1).padded(0.05)
    up = Scale.around([one.y for one in given], narrow=0.1).padded(0.07)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * across.share(value)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - up.share(value))

    return {
        "points": [
            {
                "style": f"s{one.style % 6}",
                "d": marker(one.style, x(one.x), y(one.y), 5),
                "name": one.name,
                "value": one.y,
                "at": (*points([x(one.x) + 9]), points([height])[0]),
            }
            for one, height in zip(given, _apart([(x(p.x), y(p.y)) for p in given]), strict=True)
        ],
        "across": [(*points([x(tick)]), tick) for tick in across.ticks()],
        "up": [(*points([y(tick)]), tick) for tick in up.ticks()],
        "x_name": x_name + (", log scale" if across.log else ""),
        "y_name": y_name + (", log scale" if up.log else ""),
        "legend": [(f"s{i % 6}", marker(i, 17, 7, 4), name) for i, name in enumerate(legend)],
    }


def _apart(places: Sequence[tuple[float, float]]) -> list[float]:
    """Heights of names next to their points, moved where two would overlap."""
    found = [0.0] * len(places)
    taken: list[tuple[float, float]] = []
    for index in sorted(range(len(places)), key=lambda i: places[i][1]):
        x, height = places[index]
        for other_x, other in sorted(taken, key=lambda one: one[1]):
            if abs(other_x - x) < 140 and abs(other - height) < _ROOM:
                height = other + _ROOM
        taken.append((x, height))
        found[index] = height
    return found
