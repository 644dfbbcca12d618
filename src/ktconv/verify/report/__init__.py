"""The result of a verification as one HTML page that needs nothing else.

The page holds its style and pictures, asks no network, reads without its script, and treats
every text of the result as hostile: tensor names and generated text come from anywhere. Its
content security policy lets no other script run even if an escape were forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.units import format_size
from ktconv.verify.report.charts import DEFINITIONS, Series, drawable, line_chart
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
    tiles,
)
from ktconv.verify.report.style import SCRIPT, STYLE

_LEVELS = {
    "structure": "files, names, shapes, checksums",
    "weights": "every number against its source",
    "layers": "outputs of whole layers",
    "model": "perplexity and text",
}
_TONES = {True: "pass", False: "fail"}
_GLYPHS = {"pass": "M19 31l8 8 15-17", "fail": "M21 21l18 18M39 21L21 39", "skip": "M20 30h20"}


def render_report(result: Mapping[str, Any]) -> str:
    """The page for the result of `ktconv verify --json`; the same result gives the same page."""
    sections = [
        _verdict(result),
        _failures(result),
        _notes(result),
        _structure(mapping(result.get("structure"))),
        _weights(mapping(result.get("weights"))),
        _layers(mapping(result.get("layers"))),
        _by_layer(mapping(result.get("weights")), mapping(result.get("layers"))),
        _model(mapping(result.get("model"))),
        _provenance(result),
    ]
    version = f"ktconv {show_id(result['ktconv_version'])}" if result.get("ktconv_version") else ""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_TITLES[_tone_of(result)]}: {escape(_name(result.get("output")))}</title>
<style>{STYLE}</style>
</head>
<body>
{DEFINITIONS}<div class="top"><strong>ktconv verify</strong><span>{version}</span></div>
<main>
{"".join(sections)}</main>
<footer>Errors are relative and without a unit: 0.1 is 10 %. A dash (–) or hatching marks what
was not measured; it is not zero.</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""


# --- verdict ----------------------------------------------------------------------------

_TITLES = {
    "pass": "Verification passed",
    "fail": "Verification failed",
    "skip": "Verification without a verdict",
}


def _tone_of(result: Mapping[str, Any]) -> str:
    """Passed only if the result says so and holds no failure."""
    passed = result.get("passed")
    if _failure_count(result) or (passed is not None and passed is not True):
        return "fail"
    return "pass" if passed is True else "skip"


def _failure_count(result: Mapping[str, Any]) -> int:
    """As the result says, but no fewer than it lists."""
    count = number(result.get("failure_count"))
    listed = len(items(result.get("failures")))
    return max(int(count), listed) if count is not None and math.isfinite(count) else listed


def _name(path: Any) -> str:
    return str(path).rstrip("/").rpartition("/")[2] if path else "no output"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _verdict(result: Mapping[str, Any]) -> str:
    tone, count = _tone_of(result), _failure_count(result)
    level = result.get("level")
    asked = f"Level <b>{escape(level)}</b>" if level else "Level not stated"
    words = f"{asked} · {_plural(count, 'failure')}"
    sample = number(result.get("sample"))
    if sample is not None and sample < 1:
        words += f" · a sample of {show_share(sample)}, not everything"
    seconds = number(result.get("seconds"))
    if seconds is not None:
        words += f" · {_duration(seconds)}"
    pairs = [
        ("output", show_path(result.get("output"))),
        ("source", show_path(result.get("source"))),
        ("method", show(result.get("method"))),
        ("NUMA parts", show(result.get("numa"))),
        ("sample", show_share(result.get("sample"))),
        ("seed", show_id(result.get("seed"))),
    ]
    return f"""<div class="verdict {tone}">
<header><svg viewBox="0 0 60 60" aria-hidden="true"><circle class="badge" cx="30" cy="30" r="30">\
</circle><path class="glyph" d="{_GLYPHS[tone]}"></path></svg>
<div><h1>{_TITLES[tone]}</h1><p>{words}</p></div></header>
<ol class="levels">
{"".join(_level(result, level) for level in _LEVELS)}</ol>
{facts(pairs)}</div>
"""


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 60:
        return f"{show(float(f'{seconds:.3g}'))} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _level(result: Mapping[str, Any], level: str) -> str:
    section = result.get(level)
    if not isinstance(section, Mapping):
        return f'<li class="skip"><b>{level}</b><span>not run</span></li>\n'
    passed = section.get("passed")
    tone = _TONES.get(passed, "skip") if isinstance(passed, bool) else "skip"
    word = {"pass": "✓ passed", "fail": "✗ failed", "skip": "no verdict"}[tone]
    return (
        f'<li class="{tone}" title="{_LEVELS[level]}"><b><a href="#{level}">{level}</a></b>'
        f"<span>{word}</span></li>\n"
    )


def _pill(section: Mapping[str, Any]) -> str:
    passed = section.get("passed")
    if not isinstance(passed, bool):
        return ""
    return f'<span class="pill {_TONES[passed]}">{"✓ passed" if passed else "✗ failed"}</span>'


def _section(name: str, title: str, lead: str, body: str, pill: str = "") -> str:
    lead = f'<p class="lead">{lead}</p>\n' if lead else ""
    return f'<section id="{name}">\n<h2>{title} {pill}</h2>\n{lead}{body}</section>\n'


# --- failures ---------------------------------------------------------------------------

_PLACE = ("file", "tensor")
_FAILURE_COLUMNS = (
    Column("what", lambda failure: failure, lambda failure: _what(failure), text=True),
    Column("layer", key("layer"), show_id),
    Column("expert", key("expert"), show_id),
    Column("projection", key("projection"), text=True),
    Column("part", key("part"), show_id),
    Column("row", key("row"), show_id),
    Column("column", key("column"), show_id),
    Column("source value", key("source_value")),
    Column("value", key("value")),
    Column("steps off", key("steps")),
)
_SHOWN = {
    *_PLACE,
    *("level", "check", "message", "layer", "expert", "projection", "part", "row", "column"),
    *("source_value", "value", "steps"),
}


def _what(failure: Mapping[str, Any]) -> str:
    """The message, the place below it, and whatever else the failure tells."""
    places = [show_path(failure[name]) for name in _PLACE if failure.get(name) is not None]
    others = [
        f'<span class="code">{escape(name)}: {show_id(value)}</span>'
        for name, value in failure.items()
        if name not in _SHOWN and value is not None
    ]
    return f'<div class="what">{show(failure.get("message"))}{"".join(places + others)}</div>'


def _badness(failure: Mapping[str, Any]) -> float:
    """How far off, in steps or else in value; what is no number is worst, the unknown last."""
    steps = number(failure.get("steps"))
    if steps is not None:
        return math.inf if math.isnan(steps) else abs(steps)
    source, value = number(failure.get("source_value")), number(failure.get("value"))
    if value is None:
        return -1.0
    distance = abs(value - (source or 0.0))
    return math.inf if math.isnan(distance) else distance


def _groups(failures: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """By level and check. Lower levels first: what fails there explains much of the rest."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for failure in failures:
        kind = (str(failure.get("level")), str(failure.get("check")))
        groups.setdefault(kind, []).append(failure)
    order = {level: place for place, level in enumerate(_LEVELS)}
    ranked = sorted(
        groups.items(), key=lambda item: (order.get(item[0][0], len(order)), -len(item[1]), item[0])
    )
    return [sorted(group, key=_badness, reverse=True) for _, group in ranked]


def _failures(result: Mapping[str, Any]) -> str:
    failures = [
        item if isinstance(item, Mapping) else {"message": item}
        for item in items(result.get("failures"))
    ]
    count = _failure_count(result)
    if not count:
        return ""
    parts = []
    for group in _groups(failures):
        level, check = group[0].get("level"), group[0].get("check")
        parts.append(
            f'<h3 class="group"><span>{show(check)}</span><span class="pill">{show(level)}</span>'
            f'<span class="soft">{len(group):,}</span></h3>\n'
        )
        parts.append(table(_FAILURE_COLUMNS, group, f"failures of {check}"))
    lead = "Grouped by check, the worst of each group first."
    if count > len(failures):
        lead += f" {len(failures):,} of {count:,} are listed."
    pill = f'<span class="pill fail">{count:,}</span>'
    return _section("failures", "Failures", lead, "".join(parts), pill)


def _notes(result: Mapping[str, Any]) -> str:
    notes = items(result.get("notes"))
    if not notes:
        return ""
    listed = "".join(f"<li>{show(note)}</li>\n" for note in notes)
    return _section("notes", "Notes", "", f'<ul class="notes">\n{listed}</ul>\n')


# --- the four levels --------------------------------------------------------------------


def _structure(structure: Mapping[str, Any]) -> str:
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
    return _section("structure", "Structure", lead, body, _pill(structure))


def _weights(weights: Mapping[str, Any]) -> str:
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
        picture = heat_map([_label(layer) for layer in layers], experts)
        body += _figure(
            "Every expert", "Relative RMS error of the weights, by layer and expert.", picture
        )
    series = [
        Series(
            "all experts of the layer",
            [number(layer.get("relative_rms_error")) for layer in layers],
            [_range(row) for row in experts],
            "least to greatest expert",
        )
    ]
    body += _chart("Weights by layer", "Relative RMS error of the weights.", layers, series)
    if worst := records(weights.get("worst")):
        body += "<h3>Worst matrices</h3>\n" + table(_WORST_COLUMNS, worst, "worst matrices")
    lead = "The packed numbers, unpacked, against those of the source."
    return _section("weights", "Weights", lead, body, _pill(weights))


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


def _range(row: Sequence[float | None]) -> tuple[float, float] | None:
    given = [value for value in row if value is not None and drawable(value)]
    return (min(given), max(given)) if len(given) > 1 else None


def _label(layer: Mapping[str, Any]) -> str:
    value = layer.get("layer")
    return "?" if value is None else str(value)


def _places(layers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Where layers lie on the axis: by their numbers, or in order if those are unusable."""
    places = [number(layer.get("layer")) for layer in layers]
    usable = [place for place in places if place is not None and 0 <= place < 100_000]
    if len(usable) < len(places) or usable != sorted(set(usable)):
        return [float(index) for index in range(len(places))]
    return usable


def _figure(title: str, words: str, picture: str) -> str:
    caption = f"<figcaption><b>{title}</b><span>{words}</span></figcaption>"
    return f"<figure>{caption}\n{picture}</figure>\n"


def _chart(
    title: str, words: str, layers: Sequence[Mapping[str, Any]], series: Sequence[Series]
) -> str:
    used = [one for one in series if any(value is not None for value in one.values)]
    if not used:
        return ""
    picture = line_chart([_label(layer) for layer in layers], _places(layers), used)
    return _figure(title, words, picture)


def _isas(section: Mapping[str, Any]) -> list[str]:
    """Levels of the kernels: those announced, then any other that a layer names."""
    named = [str(isa) for isa in items(section.get("isas"))]
    rows = records(section.get("layers"))
    found = [str(isa) for layer in rows for isa in mapping(layer.get("kernel_error"))]
    return list(dict.fromkeys(named + found))


def _layers(section: Mapping[str, Any]) -> str:
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
    body += _chart("Outputs by layer", words, rows, series)
    lead = "Whole layers run on hidden states, converted against source."
    return _section("layers", "Layers", lead, body, _pill(section))


def _by_layer(weights: Mapping[str, Any], layers: Mapping[str, Any]) -> str:
    """One row per layer with what both levels found."""
    rows: dict[str, dict[str, Any]] = {}
    for layer in [*records(weights.get("layers")), *records(layers.get("layers"))]:
        rows.setdefault(_label(layer), {}).update(layer)
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
    return _section(
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


# --- model ------------------------------------------------------------------------------

_MEASURES = (
    ("perplexity_increase", "increase of perplexity"),
    ("kl_mean", "KL divergence, mean"),
    ("kl_p99", "KL divergence, 99th percentile"),
    ("top1_agreement", "same likeliest token"),
)


def _model(model: Mapping[str, Any]) -> str:
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
    return _section("model", "Model", lead, body, _pill(model))


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
        words = f"The texts agree for {_plural(shared, 'character')}; marked is where they part."
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


# --- provenance -------------------------------------------------------------------------

_MAX_FACTS = 80
_MAX_ENTRIES = 24


def _provenance(result: Mapping[str, Any]) -> str:
    provenance = mapping(result.get("provenance"))
    if not provenance:
        return ""
    parts = []
    for name, value in provenance.items():
        title = {"manifest": "The conversion’s manifest", "machine": "This machine"}.get(
            name, escape(name)
        )
        parts.append(f"<h3>{title}</h3>\n")
        if value is None:
            parts.append('<p class="soft">There is none.</p>\n')
            continue
        pairs = _flat("", value)
        parts.append(facts(pairs[:_MAX_FACTS]))
        if len(pairs) > _MAX_FACTS:
            parts.append(f'<p class="soft">and {len(pairs) - _MAX_FACTS:,} more</p>\n')
    return _section("provenance", "Provenance", "", "".join(parts))


def _flat(name: str, value: Any, depth: int = 0) -> list[tuple[str, str]]:
    """Facts one below another, a.b for what is nested; long lists become their length."""
    if isinstance(value, Mapping) and value and depth < 4 and len(value) <= _MAX_ENTRIES:
        return [
            pair
            for inner, content in value.items()
            for pair in _flat(f"{name}.{inner}" if name else str(inner), content, depth + 1)
        ]
    if isinstance(value, (Mapping, list, tuple)):
        if len(value) > _MAX_ENTRIES or any(isinstance(item, (Mapping, list)) for item in value):
            return [(name, f'<span class="soft">{_plural(len(value), "value")}</span>')]
        return [(name, ", ".join(show_id(item) for item in value) if value else show([*value]))]
    return [(name, show_id(value))]
