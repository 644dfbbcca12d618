"""Level model: measures beside their limits, and the generated texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.verify.report.charts import drawable
from ktconv.verify.report.html import (
    Column,
    escape,
    facts,
    key,
    mapping,
    number,
    show,
    show_share,
    table,
    tiles,
)
from ktconv.verify.report.parts import as_section, pill, plural

_MEASURES = (
    ("perplexity_increase", "increase of perplexity"),
    ("kl_mean", "KL divergence, mean"),
    ("kl_p99", "KL divergence, 99th percentile"),
    ("top1_agreement", "same likeliest token"),
)


def model_section(model: Mapping[str, Any]) -> str:
    if not model:
        return ""
    source = number(model.get("perplexity_source"))
    converted = number(model.get("perplexity_converted"))
    change = ""
    if drawable(source) and drawable(converted) and source and converted:
        share = (converted / source - 1) * 100
        change = f"{share:+.2f} % against the source".replace("-", "−")
    p99 = model.get("kl_p99")
    tail = f"99th percentile {show(p99)}" if p99 is not None else ""
    body = tiles(
        [
            ("perplexity, source", show(model.get("perplexity_source")), ""),
            ("perplexity, converted", show(model.get("perplexity_converted")), change),
            ("KL divergence, mean", show(model.get("kl_mean")), tail),
            ("same likeliest token", show_share(model.get("top1_agreement")), ""),
        ]
    )
    pairs = [("text", show(model.get("text"))), ("tokens", show(model.get("tokens")))]
    body += facts(pairs) + _thresholds(model)
    if generation := mapping(model.get("generation")):
        body += _generation(generation)
    lead = "The whole model, source and converted, on the same text."
    return as_section("model", "Model", lead, body, pill(model))


def _thresholds(model: Mapping[str, Any]) -> str:
    """Measures beside their limits, then limits of anything else."""
    limits = dict(mapping(model.get("thresholds")))
    rows = [
        {"name": words, "value": model.get(name), "limit": limits.pop(name, None)}
        for name, words in _MEASURES
    ]
    rows += [{"name": str(name), "limit": limit} for name, limit in limits.items()]
    columns = (
        Column("measure", key("name"), text=True),
        Column("value", key("value")),
        Column("threshold", key("limit")),
    )
    return "<h3>Measures and thresholds</h3>\n" + table(columns, rows, "measures of the model")


def _generation(generation: Mapping[str, Any]) -> str:
    source, converted = (generation.get(name) for name in ("source", "converted"))
    shared = 0
    if isinstance(source, str) and isinstance(converted, str):
        pairs = zip(source, converted, strict=False)
        shared = next(
            (index for index, (a, b) in enumerate(pairs) if a != b),
            min(len(source), len(converted)),
        )
        words = f"The texts agree for {plural(shared, 'character')}; marked is where they part."
        if source == converted:
            words = "Both texts are the same, character by character."
    else:
        words = "Not both texts are there to compare."
        shared = -1
    return f"""<h3>Generated text</h3>
<p class="soft">{words}</p>
<div class="prompt"><h4>prompt</h4><pre dir="auto">{show(generation.get("prompt"))}</pre></div>
<div class="texts">
<div><h4>source</h4><pre dir="auto">{_parted(source, shared)}</pre></div>
<div><h4>converted</h4><pre dir="auto">{_parted(converted, shared)}</pre></div>
</div>
"""


def _parted(text: Any, shared: int) -> str:
    if not isinstance(text, str) or not text or not 0 <= shared < len(text):
        return show(text)
    return f"{escape(text[:shared])}<mark>{escape(text[shared:])}</mark>"
