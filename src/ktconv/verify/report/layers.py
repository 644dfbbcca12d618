"""Level layers, and a table of what it and level weights found in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.verify.report.charts import Series
from ktconv.verify.report.html import (
    Column,
    escape,
    items,
    key,
    mapping,
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
from ktconv.verify.report.parts import as_section, chart_by_layer, label, pill


def _isas(section: Mapping[str, Any]) -> list[str]:
    """Levels of the kernels: those announced, then any other that a layer names."""
    named = [str(isa) for isa in items(section.get("isas"))]
    rows = records(section.get("layers"))
    found = [str(isa) for layer in rows for isa in mapping(layer.get("kernel_error"))]
    return list(dict.fromkeys(named + found))


def layers_section(section: Mapping[str, Any]) -> str:
    if not section:
        return ""
    rows, isas = records(section.get("layers")), _isas(section)
    body = tiles(
        [
            ("layers run", f"{len(rows):,}", ""),
            ("tokens", show(section.get("tokens")), ""),
            ("hidden states", show(section.get("states")), ""),
            ("kernels", escape(", ".join(isas)) if isas else show(None), ""),
        ]
    )
    series = [
        Series("quantization", [number(row.get("quantization_error")) for row in rows]),
        Series(
            "quantization, with shared experts",
            [number(row.get("quantization_error_with_shared")) for row in rows],
        ),
    ]
    series += [
        Series(
            f"kernel, {isa}", [number(mapping(row.get("kernel_error")).get(isa)) for row in rows]
        )
        for isa in isas
    ]
    words = (
        "Quantization: how far a layer's output is from float32 arithmetic on the source's "
        "weights. Kernel: from float32 arithmetic on the same packed weights, activations "
        "rounded alike."
    )
    body += chart_by_layer("Outputs by layer", words, rows, series)
    lead = "Whole layers run on hidden states, converted against source."
    return as_section("layers", "Layers", lead, body, pill(section))


def by_layer_section(weights: Mapping[str, Any], layers: Mapping[str, Any]) -> str:
    """One row per layer with what both levels found."""
    rows: dict[str, dict[str, Any]] = {}
    for layer in [*records(weights.get("layers")), *records(layers.get("layers"))]:
        rows.setdefault(label(layer), {}).update(layer)
    if not rows:
        return ""
    columns = [
        Column("layer", key("layer"), show_id),
        Column("relative RMS error", key("relative_rms_error"), show_error),
        Column("cosine", key("cosine"), show_cosine),
        Column("largest error in steps", key("max_error_steps")),
        Column("share of zeros", key("zero_share"), show_share),
        Column("experts sampled", _sampled),
        Column("quantization error", key("quantization_error"), show_error),
        Column("with shared experts", key("quantization_error_with_shared"), show_error),
        *(
            Column(f"kernel error, {isa}", key("kernel_error", isa), show_error)
            for isa in _isas(layers)
        ),
        Column("worst expert", key("worst_expert", "expert"), show_id),
        Column("its error", key("worst_expert", "error"), show_error),
        Column("experts run", _run),
    ]
    return as_section(
        "by-layer",
        "Layer by layer",
        "What both levels found.",
        table(columns, list(rows.values()), "layers"),
    )


def _sampled(row: Mapping[str, Any]) -> int | None:
    experts = items(row.get("experts"))
    return sum(value is not None for value in experts) if experts else None


def _run(row: Mapping[str, Any]) -> Any:
    """experts_run is a count, or the experts' numbers."""
    value = row.get("experts_run")
    return len(items(value)) if items(value) else value
