"""Pieces that several sections of the page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.verify.report.charts import Series, drawable, line_chart
from ktconv.verify.report.html import number

LEVELS = {
    "structure": "files, names, shapes, checksums",
    "weights": "every number against its source",
    "layers": "outputs of whole layers",
    "model": "perplexity and text",
}
TONES = {True: "pass", False: "fail"}
_GLYPHS = {"pass": "M19 31l8 8 15-17", "fail": "M21 21l18 18M39 21L21 39", "skip": "M20 30h20"}


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def pill(section: Mapping[str, Any]) -> str:
    """The mark of a level that has a verdict."""
    passed = section.get("passed")
    if not isinstance(passed, bool):
        return ""
    return f'<span class="pill {TONES[passed]}">{"✓ passed" if passed else "✗ failed"}</span>'


def banner(tone: str, title: str, words: str, inside: str) -> str:
    """The head of a page: `tone` is pass, fail or skip."""
    return f"""<div class="verdict {tone}">
<header><svg viewBox="0 0 60 60" aria-hidden="true"><circle class="badge" cx="30" cy="30" r="30">\
</circle><path class="glyph" d="{_GLYPHS[tone]}"></path></svg>
<div><h1>{title}</h1><p>{words}</p></div></header>
{inside}</div>
"""


def as_section(name: str, title: str, lead: str, body: str, pill: str = "") -> str:
    """A section of the page; `lead` is the sentence under its title."""
    lead = f'<p class="lead">{lead}</p>\n' if lead else ""
    return f'<section id="{name}">\n<h2>{title} {pill}</h2>\n{lead}{body}</section>\n'


def captioned(title: str, words: str, picture: str) -> str:
    """A picture with what it shows."""
    caption = f"<figcaption><b>{title}</b><span>{words}</span></figcaption>"
    return f"<figure>{caption}\n{picture}</figure>\n"


def chart_by_layer(
    title: str, words: str, layers: Sequence[Mapping[str, Any]], series: Sequence[Series]
) -> str:
    """Lines over the layers; nothing where nothing was measured."""
    used = [one for one in series if any(value is not None for value in one.values)]
    if not used:
        return ""
    picture = line_chart([label(layer) for layer in layers], _places(layers), used)
    return captioned(title, words, picture)


def spread(row: Sequence[float | None]) -> tuple[float, float] | None:
    """Least and greatest, of what can be drawn."""
    given = [value for value in row if value is not None and drawable(value)]
    return (min(given), max(given)) if len(given) > 1 else None


def label(layer: Mapping[str, Any]) -> str:
    value = layer.get("layer")
    return "?" if value is None else str(value)


def _places(layers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Where layers lie on the axis: by their numbers, or in order if those are unusable."""
    places = [number(layer.get("layer")) for layer in layers]
    usable = [place for place in places if place is not None and 0 <= place < 100_000]
    if len(usable) < len(places) or usable != sorted(set(usable)):
        return [float(index) for index in range(len(places))]
    return usable
