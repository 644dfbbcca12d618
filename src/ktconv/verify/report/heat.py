"""The error of every expert as a picture: a cell per layer and expert."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from ktconv.verify.report.charts import WIDTH, Scale, drawable, legend, swatch
from ktconv.verify.report.values import escape, figure

SHADES = 16  # colours in report.css
_LOG_SHADES_FROM = 4.0  # from this ratio on, so that one bad expert leaves others distinct


def heat_map(labels: Sequence[str], rows: Sequence[Sequence[float | None]]) -> Markup:
    """A cell per layer and expert, and the legend of its colours."""
    columns = max(map(len, rows), default=0)
    if not columns:
        return Markup()
    left, bottom, width = 58, 44, WIDTH - 58 - 8
    cell = min(width / columns, 46.0)
    height = min(max(440 / len(rows), 7.0), 26.0)
    sampled = (value for row in rows for value in row if value)
    scale = Scale.around(sampled, log_from=_LOG_SHADES_FROM)
    gap = 2.0 if cell >= 12 else 0.6 if cell >= 6 else -0.4  # tiny cells overlap: no seams
    parts = []
    for index, (label, row) in enumerate(zip(labels, rows, strict=True)):
        cells = "".join(
            f'<rect x="{expert * cell:.2f}" width="{cell - gap:.2f}" '
            f'height="{height - (2 if height >= 12 else 1):.4g}" class="{_shade_of(value, scale)}">'
            f"<title>layer {escape(label)}, expert {expert}: {_words(value)}</title></rect>\n"
            for expert, value in enumerate(row)
        )
        parts.append(f'<g transform="translate({left} {4 + index * height:g})">{cells}</g>\n')
    base = 4 + len(rows) * height
    parts.append(_layer_names(labels, height, left - 9))
    parts.append(_expert_names(columns, cell, gap, left, base))
    parts.append(_ring(rows, cell, gap, height, left))
    total = max(left + columns * cell + 8, 620)
    widths = f"max-width:{total:g}px;min-width:{min(total, 900):g}px"
    view = f"0 0 {total:g} {base + bottom:g}"
    return Markup(
        f'<div class="wide"><svg class="heat" viewBox="{view}" style="{widths}" '
        'role="img" aria-label="relative RMS error of every expert by layer">\n'
        f"{''.join(parts)}</svg></div>\n{_heat_legend(rows, scale)}"
    )


def _words(value: float | None) -> str:
    return "not sampled" if value is None else figure(value)


def _shade_of(value: float | None, scale: Scale) -> str:
    if value is None:
        return "m"
    if not drawable(value):
        return "x"
    return f"c{min(int(scale.share(value) * SHADES), SHADES - 1)}" if value else "z"


def _layer_names(labels: Sequence[str], height: float, right: float) -> str:
    every = math.ceil(15 / height)
    every = next((step for step in (1, 2, 5, 10, 20, 50) if step >= every), every)
    parts = [
        f'<text x="{right:g}" y="{4 + (index + 0.5) * height - 1:g}" dy=".35em" '
        f'text-anchor="end">{escape(label[:6])}</text>\n'
        for index, label in enumerate(labels)
        if (int(label) if label.isdecimal() and len(label) < 9 else index) % every == 0
    ]
    middle = 4 + len(labels) * height / 2
    parts.append(
        f'<text class="title" transform="translate(12 {middle:g}) rotate(-90)" '
        'text-anchor="middle">layer</text>\n'
    )
    return "".join(parts)


def _expert_names(columns: int, cell: float, gap: float, left: float, base: float) -> str:
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 1 << 40) if step * cell >= 30)
    parts = [
        f'<text x="{left + expert * cell + (cell - gap) / 2:.1f}" y="{base + 15:g}" '
        f'text-anchor="middle">{expert}</text>\n'
        for expert in range(0, columns, every)
    ]
    parts.append(
        f'<text class="title" x="{left + columns * cell / 2:.1f}" y="{base + 36:g}" '
        'text-anchor="middle">expert</text>\n'
    )
    return "".join(parts)


def _highest(rows: Sequence[Sequence[float | None]]) -> tuple[float, int, int] | None:
    cells = (
        (value, -index, -expert)
        for index, row in enumerate(rows)
        for expert, value in enumerate(row)
        if value and drawable(value)
    )
    found = max(cells, default=None)
    return (found[0], -found[1], -found[2]) if found else None


def _ring(
    rows: Sequence[Sequence[float | None]], cell: float, gap: float, height: float, left: float
) -> str:
    """A frame around the highest value, which is hard to find in a large map."""
    highest = _highest(rows)
    if highest is None:
        return ""
    _, index, expert = highest
    place = (
        f'x="{left + expert * cell - 3:.1f}" y="{4 + index * height - 3:g}" '
        f'width="{cell - gap + 6:.1f}" height="{height + 4.5:g}" rx="2"'
    )
    return f'<rect class="halo" {place}></rect><rect class="ring" {place}></rect>\n'


def _ramp(scale: Scale) -> str:
    """The colours from low to high, with the values at the ends and in the middle."""
    wide = 18 * SHADES
    bar = "".join(
        f'<rect class="c{step}" x="{step * 18}" width="18.5" height="12"></rect>'
        for step in range(SHADES)
    )
    names = "".join(
        f'<text x="{share * wide:g}" y="27" text-anchor="{anchor}">'
        f"{figure(float(f'{scale.value(share):.3g}'))}</text>"
        for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end"))
    )
    return f'<svg class="heat" width="{wide}" height="31" role="img">{bar}{names}</svg>'


def _heat_legend(rows: Sequence[Sequence[float | None]], scale: Scale) -> str:
    flat = [value for row in rows for value in row]
    entries = []
    if _highest(rows):
        entries.append((_ramp(scale), "log scale" if scale.log else ""))
        ring = '<rect class="ring" x="2" y="1" width="16" height="12" rx="2"></rect>'
        entries.append((swatch(ring), "highest"))
    kinds = (
        ("z", "exactly 0", any(value == 0 for value in flat)),
        ("m", "not sampled", any(value is None for value in flat)),
        ("x", "not a finite number", any(v is not None and not drawable(v) for v in flat)),
    )
    entries += [
        (swatch(f'<rect class="{kind}" width="20" height="14"></rect>'), name)
        for kind, name, found in kinds
        if found
    ]
    return legend(entries)
