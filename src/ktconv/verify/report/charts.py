"""Pictures of the report as inline SVG: errors over layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ktconv.verify.report.values import escape, figure

_HUGE = 1e30  # larger values are drawn as infinities
_TINY = 1e-30
_LOG_FROM = 20.0  # the ratio of largest to smallest value from which a scale is logarithmic


def drawable(value: float | None) -> bool:
    return value is not None and abs(value) < _HUGE


@dataclass(frozen=True, slots=True)
class Scale:
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


@dataclass(frozen=True, slots=True)
class Series:
    """A line with a value for each layer, None where nothing was measured."""

    name: str
    values: Sequence[float | None]
    band: Sequence[tuple[float, float] | None] = ()
    band_name: str = ""


WIDTH, _HEIGHT = 1120, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 18, 16, 46
_DASHES = ("", "7 4", "2 4", "9 3 2 3", "12 4", "4 2")


def _points(values: Sequence[float]) -> list[str]:
    return [f"{value:.1f}".removesuffix(".0") for value in values]


def _marker(style: int, x: float, y: float, size: float) -> str:
    """The path of a circle, square, triangle or diamond, so that lines differ without colours."""
    s = size
    u, v = _points([x, y])
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
        self.slot = (WIDTH - _LEFT - _RIGHT) / (self.span + 1 if self.span < 1000 else 1000)

    def x(self, layer: float) -> float:
        inner = WIDTH - _LEFT - _RIGHT - self.slot
        return (
            _LEFT + self.slot / 2 + inner * ((layer - self.first) / self.span if self.span else 0)
        )

    def zero_off(self, value: float | None) -> bool:
        """Whether the value is a zero, which a logarithmic scale cannot show."""
        return self.scale.log and value == 0

    def y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - self.scale.share(value))


def line_chart(labels: Sequence[str], layers: Sequence[float], series: Sequence[Series]) -> Markup:
    """Lines over layers, which have labels (as in the result) and places on the axis."""
    plane = _Plane(layers, series)
    parts = [_axes(plane, labels), _unmeasured(plane, labels, series)]
    parts += [_band(plane, one) for one in series if one.band]
    parts += [_line(plane, index, one) for index, one in enumerate(series)]
    parts += [_dots(plane, index, one, labels) for index, one in enumerate(series)]
    names = escape(", ".join(one.name for one in series))
    return Markup(
        f'<div class="wide"><svg viewBox="0 0 {WIDTH} {_HEIGHT}" style="min-width:900px" '
        f'role="img" aria-label="{names} by layer">\n{"".join(parts)}</svg></div>\n'
        f"{_legend(plane, series, parts[1])}"
    )


def _axes(plane: _Plane, labels: Sequence[str]) -> str:
    right, bottom = WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in plane.scale.ticks():
        (y,) = _points([plane.y(tick)])
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y}H{right}"></path>'
            f'<text x="{_LEFT - 10}" y="{y}" dy=".35em" text-anchor="end">{figure(tick)}</text>\n'
        )
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"></path>\n')
    ahead = -math.inf
    for layer, label in zip(plane.layers, labels, strict=True):
        x = plane.x(layer)
        if x < ahead:
            continue
        ahead = x + max(30, 9 * len(label))
        u = _points([x])[0]
        parts.append(
            f'<path class="axis" d="M{u} {bottom}v5"></path>'
            f'<text x="{u}" y="{bottom + 19}" text-anchor="middle">{escape(label[:12])}</text>\n'
        )
    middle = (_TOP + bottom) / 2
    unit = "relative error (0.1 = 10 %)" + (", log scale" if plane.scale.log else "")
    parts.append(
        f'<text class="title" x="{(_LEFT + right) / 2:g}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f'layer</text><text class="title" transform="translate(14 {middle:g}) rotate(-90)" '
        f'text-anchor="middle">{unit}</text>\n'
    )
    return "".join(parts)


def _unmeasured(plane: _Plane, labels: Sequence[str], series: Sequence[Series]) -> str:
    """A hatched column for each layer without values."""
    parts = []
    for index, label in enumerate(labels):
        if any(one.values[index] is not None for one in series):
            continue
        x, width = _points([plane.x(plane.layers[index]) - plane.slot / 2, plane.slot])
        parts.append(
            f'<rect class="m" x="{x}" y="{_TOP}" width="{width}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}">'
            f"<title>layer {escape(label)}: not measured</title></rect>\n"
        )
    return "".join(parts)


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
    return "M" + "L".join(" ".join(_points(corner)) for corner in run)


def _band(plane: _Plane, one: Series) -> str:
    pairs = [None if pair and plane.zero_off(pair[1]) else pair for pair in one.band]
    tops = _runs(plane, [pair[1] if pair else None for pair in pairs])
    bottoms = _runs(plane, [(pair[0] or _TINY) if pair else None for pair in pairs])
    return "".join(
        f'<path class="band" d="{_path(top + bottom[::-1])}z"></path>\n'
        for top, bottom in zip(tops, bottoms, strict=True)
    )


def _line(plane: _Plane, index: int, one: Series) -> str:
    runs = _runs(plane, one.values)
    return "".join(f"{_stroke(index, _path(run))}\n" for run in runs if len(run) > 1)


def _stroke(index: int, d: str) -> str:
    dash = _DASHES[index % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="line s{index % 6}"{dashes} d="{d}"></path>'


def _dots(plane: _Plane, index: int, one: Series, labels: Sequence[str]) -> str:
    """A marker per value. A cross at the top is not a finite number, a hollow marker at the bottom
    is a 0 on a logarithmic axis."""
    size = 4.0 if len(plane.layers) <= 24 else 2.6
    parts = []
    for layer, label, value in zip(plane.layers, labels, one.values, strict=True):
        if value is None:
            continue
        title = f"<title>layer {escape(label)}, {escape(one.name)}: {figure(value)}</title>"
        if drawable(value):
            d = _marker(index, plane.x(layer), plane.y(value), size)
            kind = "hollow" if plane.zero_off(value) else "dot"
            parts.append(f'<path class="{kind} s{index % 6}" d="{d}">{title}</path>\n')
        else:
            (x,) = _points([plane.x(layer)])
            d = f"M{x} {_TOP}m-5 -5l10 10m0 -10l-10 10"
            parts.append(f'<path class="off" d="{d}">{title}</path>\n')
    return "".join(parts)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A list of drawings with what they mean."""
    items = "".join(f"<li>{drawing}{words}</li>\n" for drawing, words in entries)
    return f'<ul class="legend">\n{items}</ul>\n'


def swatch(body: str, width: int = 20) -> str:
    return f'<svg width="{width}" height="14" aria-hidden="true">{body}</svg>'


def _legend(plane: _Plane, series: Sequence[Series], unmeasured: str) -> str:
    entries: list[tuple[str, str]] = []
    for index, one in enumerate(series):
        marker = f'<path class="dot s{index % 6}" d="{_marker(index, 17, 7, 4)}"></path>'
        entries.append((swatch(_stroke(index, "M1 7H33") + marker, 34), escape(one.name)))
        if any(one.band):
            area = '<rect class="band" y="1" width="34" height="12"></rect>'
            entries.append((swatch(area, 34), escape(one.band_name)))
    values = [value for one in series for value in one.values]
    if any(value is not None and not drawable(value) for value in values):
        cross = '<path class="off" d="M5 2l10 10m0 -10l-10 10"></path>'
        entries.append((swatch(cross), "not a finite number"))
    if any(map(plane.zero_off, values)):
        hollow = f'<path class="hollow s5" d="{_marker(0, 10, 7, 4)}"></path>'
        entries.append((swatch(hollow), "exactly 0, below the axis"))
    if unmeasured:
        entries.append((swatch('<rect class="m" width="20" height="14"></rect>'), "not measured"))
    return legend(entries)
