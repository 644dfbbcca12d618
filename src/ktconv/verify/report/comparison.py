"""The page of two conversions that were compared: equal, or where and how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.verify.report.charts import Series
from ktconv.verify.report.failures import notes_section
from ktconv.verify.report.heat import heat_map
from ktconv.verify.report.html import (
    Column,
    escape,
    facts,
    items,
    key,
    mapping,
    number,
    records,
    show,
    show_cosine,
    show_error,
    show_id,
    show_path,
    show_share,
    table,
)
from ktconv.verify.report.parts import as_section, banner, captioned, chart_by_layer, label

_MOST_EXPERTS = 10_000
_EQUAL = ("equal bytes", "equal weights")


def comparison_title(result: Mapping[str, Any]) -> str:
    return f"Two conversions: {escape(result.get('verdict') or 'no verdict')}"


def comparison_sections(result: Mapping[str, Any]) -> list[str]:
    layers = records(result.get("layers"))
    return [
        _head(result),
        _differences(result),
        notes_section(result),
        _by_layer(layers),
        _worst(records(result.get("worst"))),
    ]


def _head(result: Mapping[str, Any]) -> str:
    equal = result.get("verdict") in _EQUAL and result.get("passed") is True
    words = f"{show(result.get('matrices'))} expert matrices, "
    words += f"{show(result.get('other_tensors'))} other tensors and "
    words += f"{show(result.get('side_files'))} side files compared"
    sample = number(result.get("sample"))
    if sample is not None and sample < 1:
        words += f" · a sample of {show_share(sample)}, not everything"
    pairs = [("A", show_path(result.get("a"))), ("B", show_path(result.get("b")))]
    sides = mapping(result.get("conversions"))
    for fact, words in (("method", "method"), ("numa", "NUMA parts"), ("layout", "layout")):
        for name in ("a", "b"):
            value = mapping(sides.get(name)).get(fact)
            pairs.append((f"{words} of {name.upper()}", show(value)))
    pairs += [("sample", show_share(result.get("sample"))), ("seed", show_id(result.get("seed")))]
    title = comparison_title(result)
    return banner("pass" if equal else "fail", title, words, facts(pairs))


def _differences(result: Mapping[str, Any]) -> str:
    found = items(result.get("differences"))
    if not found:
        return ""
    listed = "".join(f"<li>{show(sentence)}</li>\n" for sentence in found)
    lead = "Options of both conversions explain all of it." if result.get("expected") else ""
    return as_section("differences", "Differences", lead, f'<ul class="notes">\n{listed}</ul>\n')


def _by_layer(layers: Sequence[Mapping[str, Any]]) -> str:
    if not layers:
        return ""
    differences = [number(layer.get("relative_rms_difference")) for layer in layers]
    words = "Relative RMS difference of the matrices that differ."
    body = chart_by_layer(
        "Differences by layer", words, layers, [Series("all experts", differences)]
    )
    rows = [_row(records(layer.get("experts"))) for layer in layers]
    if any(rows):
        picture = heat_map([label(layer) for layer in layers], rows)
        body += captioned("Every expert", "Relative RMS difference, by layer and expert.", picture)
    body += table(_LAYER_COLUMNS, layers, "layers")
    return as_section("by-layer", "Layer by layer", "", body)


def _row(experts: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """By expert; None for those that were not compared."""
    found = {}
    for one in experts:
        expert = one.get("expert")
        if isinstance(expert, int) and 0 <= expert < _MOST_EXPERTS:
            found[expert] = number(one.get("relative_rms_difference"))
    return [found.get(expert) for expert in range(1 + max(found, default=-1))]


def _worst(matrices: Sequence[Mapping[str, Any]]) -> str:
    if not matrices:
        return ""
    body = table(_WORST_COLUMNS, matrices, "matrices that differ most")
    return as_section("worst", "Matrices that differ most", "", body)


def _projections(layer: Mapping[str, Any]) -> str | None:
    """How many matrices differ, by projection."""
    counts = mapping(layer.get("different"))
    return ", ".join(f"{count} {proj}" for proj, count in counts.items() if count) or None


_DIFFERENCE = (
    Column("relative RMS difference", key("relative_rms_difference"), show_error),
    Column("cosine", key("cosine"), show_cosine),
    Column("most steps apart", key("max_difference_steps")),
    Column("elements that differ", key("differing_elements")),
)
_LAYER_COLUMNS = (
    Column("layer", key("layer"), show_id),
    Column("matrices", key("matrices")),
    Column("equal bytes", key("equal_bytes")),
    Column("equal weights", key("equal_weights")),
    Column("different", _projections, text=True),
    *_DIFFERENCE,
)
_WORST_COLUMNS = (
    Column("layer", key("layer"), show_id),
    Column("expert", key("expert"), show_id),
    Column("projection", key("projection"), text=True),
    *_DIFFERENCE,
    Column("first row", key("row"), show_id),
    Column("column", key("column"), show_id),
    Column("in A", key("value_a")),
    Column("in B", key("value_b")),
)
