"""Pictures of the report: errors over layers. Computes what templates/charts.html draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

_HUGE = 1e30  # larger values are drawn as infinities
_TINY = 1e-30
_LOG_FROM = 20.0  # the ratio of largest to smallest value from which a scale is logarithmic


def drawable(value: float | None) -> bool:
    return value is not None and abs(value) < _HUGE


class Scale(Struct, frozen=True):
    """An axis from low to high; both are exponents of ten on a logarithmic scale."""

    low: float
    high: float
    log: bool

    @staticmethod
    def around(
        values: Iterable[float | None], *, narrow: float = 0.0, log_from: float = _LOG_FROM
    ) -> Scale:
        """The scale of the drawable values; at least `narrow` times the largest value wide."""
        given = [value for value in values if value is not None and drawable(value)]
        low, high = min(given, default=0.0), max(given, default=1.0)
        positive = [value for value in given if value > _TINY]
        if low >= 0 and positive and high > log_from * min(positive):
            return Scale(math.log10(min(positive)), math.log10(high), True)
        added = max(narrow * max(abs(low), abs(high)) - (high - low), 0.0)
        if high - low + added <= _TINY:
            added = 1.0 if high == 0 else abs(high) * 0.1
        start = low - added / 2
        return Scale(0.0 if low >= 0 > start else start, high + added / 2, False)

    def padded(self, share: float) -> Scale:
        room = (self.high - self.low) * share
        low = self.low - room
        return Scale(
            0.0 if not self.log and self.low >= 0 > low else low, self.high + room, self.log
        )

    def share(self, value: float) -> float:
        """0 at the start, 1 at the end; values outside are moved to the nearer end."""
        place = math.log10(max(value, _TINY)) if self.log else value
        return min(max((place - self.low) / (self.high - self.low), 0.0), 1.0)

    def value(self, share: float) -> float:
        place = self.low + (self.high - self.low) * share
        return float(10.0**place) if self.log else place

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the scale."""
        if not self.log:
            return _round_steps(self.low, self.high, about)
        first, last = math.floor(self.low), math.ceil(self.high)
        stride = max(1, math.ceil((last - first) / (2 * about)))
        factors = (1,) if last - first > 3 else (1, 2, 5)
        ticks = [
            float(f"{factor}e{power}")
            for power in range(first, last + 1, stride)
            for factor in factors
        ]
        return [tick for tick in ticks if self.low - 1e-9 <= math.log10(tick) <= self.high + 1e-9]


def _round_steps(low: float, high: float, about: int) -> list[float]:
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


# --- errors over layers -----------------------------------------------------------------


class Series(Struct, frozen=True):
    """A line with a value for each layer, None where nothing was measured."""

    name: str
    values: Sequence[float | None]
    band: Sequence[tuple[float, float] | None] = ()
    band_name: str = ""


WIDTH, HEIGHT = 1120, 300
LEFT, RIGHT, TOP, BOTTOM = 86, 18, 16, 46  # margins of the area of a line chart
_DASHES = ("", "7 4", "2 4", "9 3 2 3", "12 4", "4 2")


def points(values: Sequence[float]) -> list[str]:
    """Coordinates as text."""
    return [f"{value:.1f}".removesuffix(".0") for value in values]


def marker(style: int, x: float, y: float, size: float) -> str:
    """The path of a circle, square, triangle or diamond, so that lines differ without colours."""
    s = size
    u, v = points([x, y])
    return (
        f"M{u} {v}m-{s} 0a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 -{2 * s} 0z",
        f"M{u} {v}m-{s} -{s}h{2 * s}v{2 * s}h-{2 * s}z",
        f"M{u} {v}m0 -{s * 1.3:g}l{s * 1.2:g} {s * 2.2:g}h-{s * 2.4:g}z",
        f"M{u} {v}m0 -{s * 1.4:g}l{s * 1.4:g} {s * 1.4:g}l-{s * 1.4:g} {s * 1.4:g}"
        f"l-{s * 1.4:g} -{s * 1.4:g}z",
    )[style % 4]


class _Plane:
    """The area of a line chart: layers to the right, errors upward."""

    def __init__(self, layers: Sequence[float], series: Sequence[Series]) -> None:
        bounds = [end for one in series for pair in one.band if pair for end in pair]
        values = [value for one in series for value in one.values]
        self.scale = Scale.around([*values, *bounds], narrow=0.1).padded(0.07)
        self.layers = layers
        self.first, last = min(layers), max(layers)
        self.span = last - self.first
        self.slot = (WIDTH - LEFT - RIGHT) / (self.span + 1 if self.span < 1000 else 1000)

    def x(self, layer: float) -> float:
        inner = WIDTH - LEFT - RIGHT - self.slot
        return LEFT + self.slot / 2 + inner * ((layer - self.first) / self.span if self.span else 0)

    def zero_off(self, value: float | None) -> bool:
        """Whether the value is a zero, which a logarithmic scale cannot show."""
        return self.scale.log and value == 0

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - self.scale.share(value))


def line_chart(
    labels: Sequence[str], layers: Sequence[float], series: Sequence[Series]
) -> dict[str, Any]:
    """Lines over layers, which have labels (as in the result) and places on the axis."""
    plane = _Plane(layers, series)
    values = [value for one in series for value in one.values]
    slots = (points([x - plane.slot / 2, plane.slot]) for x in map(plane.x, layers))
    measured = zip(*(one.values for one in series), strict=True)
    return {
        "names": ", ".join(one.name for one in series),
        "log": plane.scale.log,
        "ticks": [(*points([plane.y(tick)]), tick) for tick in plane.scale.ticks()],
        "labels": list(_labels(plane, labels)),
        "unmeasured": [
            (*slot, label)
            for slot, label, here in zip(slots, labels, measured, strict=True)
            if all(value is None for value in here)
        ],
        "bands": [area for one in series for area in _band(plane, one)],
        "series": [_drawn(plane, index, one, labels) for index, one in enumerate(series)],
        "not_finite": any(value is not None and not drawable(value) for value in values),
        "zeros": any(map(plane.zero_off, values)),
    }


def _labels(plane: _Plane, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Places and labels, without those that would overlap the one before."""
    ahead = -math.inf
    for x, label in zip(map(plane.x, plane.layers), labels, strict=True):
        if x >= ahead:
            ahead = x + max(30, 9 * len(label))
            yield points([x])[0], label[:12]


def _drawn(plane: _Plane, index: int, one: Series, labels: Sequence[str]) -> dict[str, Any]:
    """A line and its markers."""
    runs = _runs(plane, one.values)
    return {
        "name": one.name,
        "style": f"s{index % 6}",
        "dash": _DASHES[index % len(_DASHES)],
        "marker": marker(index, 17, 7, 4),  # in the legend
        "strokes": [_path(run) for run in runs if len(run) > 1],
        "dots": list(_dots(plane, index, one, labels)),
        "band_name": one.band_name if any(one.band) else None,
    }


def _runs(plane: _Plane, values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """The corners of a line, which values that cannot be drawn interrupt."""
    runs: list[list[tuple[float, float]]] = [[]]
    for layer, value in zip(plane.layers, values, strict=True):
        if value is not None and drawable(value) and not plane.zero_off(value):
            runs[-1].append((plane.x(layer), plane.y(value)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(run: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(" ".join(points(corner)) for corner in run)


def _band(plane: _Plane, one: Series) -> Iterator[str]:
    pairs = [None if pair and plane.zero_off(pair[1]) else pair for pair in one.band]
    if pairs:
        tops = _runs(plane, [pair[1] if pair else None for pair in pairs])
        bottoms = _runs(plane, [(pair[0] or _TINY) if pair else None for pair in pairs])
        for top, bottom in zip(tops, bottoms, strict=True):
            yield f"{_path(top + bottom[::-1])}z"


def _dots(
    plane: _Plane, index: int, one: Series, labels: Sequence[str]
) -> Iterator[tuple[str, str, str, float]]:
    """A marker per value: its class, path, layer and value. A cross at the top is not a finite
    number, a hollow marker at the bottom is a 0 on a logarithmic axis."""
    size = 4.0 if len(plane.layers) <= 24 else 2.6
    for x, label, value in zip(map(plane.x, plane.layers), labels, one.values, strict=True):
        if value is None:
            continue
        if drawable(value):
            kind = "hollow" if plane.zero_off(value) else "dot"
            yield f"{kind} s{index % 6}", marker(index, x, plane.y(value), size), label, value
        else:
            yield "off", f"M{points([x])[0]} {TOP}m-5 -5l10 10m0 -10l-10 10", label, value
