"""Levels structure and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.system.units import format_size
from ktconv.verify.report.charts import Series, drawable
from ktconv.verify.report.heat import heat_map
from ktconv.verify.report.html import (
    Column,
    items,
    key,
    number,
    records,
    show,
    show_cosine,
    show_error,
    show_id,
    show_share,
    table,
    tiles,
)
from ktconv.verify.report.parts import as_section, captioned, chart_by_layer, label, pill, spread


def structure_section(structure: Mapping[str, Any]) -> str:
    if not structure:
        return ""
    expected = structure.get("tensors_expected")
    remark = f"of {show(expected)} expected" if expected is not None else ""
    size = number(structure.get("bytes_checked"))
    in_words = format_size(size) if drawable(size) and size is not None else None
    body = tiles(
        [
            ("tensors found", show(structure.get("tensors_found")), remark),
            ("files", show(structure.get("files")), ""),
            (
                "bytes checked",
                show(size if in_words is None else in_words),
                show(structure.get("bytes_checked")) if in_words else "",
            ),
            ("checksums", show(structure.get("checksums")), ""),
            ("copied tensors", show(structure.get("copied_tensors")), ""),
        ]
    )
    lead = "Whether the files hold the tensors that they should, intact."
    return as_section("structure", "Structure", lead, body, pill(structure))


def weights_section(weights: Mapping[str, Any]) -> str:
    if not weights:
        return ""
    bound = weights.get("bound_steps")
    remark = f"bound {show(bound)}" if bound is not None else ""
    body = tiles(
        [
            ("relative RMS error", show_error(weights.get("relative_rms_error")), ""),
            ("cosine", show_cosine(weights.get("cosine")), ""),
            ("largest error in steps", show(weights.get("max_error_steps")), remark),
            ("share of zeros", show_share(weights.get("zero_share")), ""),
            ("matrices", show(weights.get("matrices")), ""),
            ("elements", *_count(weights.get("elements"))),
        ]
    )
    layers = records(weights.get("layers"))
    experts = [[number(value) for value in items(layer.get("experts"))] for layer in layers]
    if any(experts):
        picture = heat_map([label(layer) for layer in layers], experts)
        body += captioned(
            "Every expert", "Relative RMS error of the weights, by layer and expert.", picture
        )
    series = [
        Series(
            "all experts of the layer",
            [number(layer.get("relative_rms_error")) for layer in layers],
            [spread(row) for row in experts],
            "least to greatest expert",
        )
    ]
    body += chart_by_layer("Weights by layer", "Relative RMS error of the weights.", layers, series)
    if worst := records(weights.get("worst")):
        body += "<h3>Worst matrices</h3>\n" + table(_WORST_COLUMNS, worst, "worst matrices")
    lead = "The packed numbers, unpacked, against those of the source."
    return as_section("weights", "Weights", lead, body, pill(weights))


_WORST_COLUMNS = (
    Column("layer", key("layer"), show_id),
    Column("expert", key("expert"), show_id),
    Column("projection", key("projection"), text=True),
    Column("relative RMS error", key("relative_rms_error"), show_error),
    Column("cosine", key("cosine"), show_cosine),
    Column("largest error in steps", key("max_error_steps")),
    Column("share of zeros", key("zero_share"), show_share),
)


def _count(value: Any) -> tuple[str, str]:
    """Millions and more in words, all digits below."""
    given = number(value)
    if given is None or not 1e6 <= given < 1e18:
        return show(value), ""
    scales = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
    factor, word = next(scale for scale in scales if given >= scale[0])
    return f"{given / factor:.4g} {word}", show(value)
