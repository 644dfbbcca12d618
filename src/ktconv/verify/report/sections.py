"""Computes what the templates show: groups of failures, merged rows, pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ktconv.system.units import counted
from ktconv.verify.report.charts import Series, drawable, line_chart
from ktconv.verify.report.heat import heat_map
from ktconv.verify.report.values import (
    Column,
    Facts,
    escape,
    finite,
    items,
    mapping,
    number,
    records,
    show,
    show_id,
    show_path,
)

LEVELS = {
    "structure": "files, names, shapes, checksums",
    "weights": "every number against its source",
    "layers": "outputs of whole layers",
    "model": "perplexity and text",
}
_MEASURES = (
    ("perplexity_increase", "increase of perplexity", "max_ppl_increase"),
    ("kl_mean", "KL divergence, mean", "max_kl"),
    ("kl_p99", "KL divergence, 99th percentile", None),
    ("top1_agreement", "same likeliest token", None),
)
_MAX_ENTRIES = 24  # of a mapping or list that is shown entry by entry
_MOST_EXPERTS = 10_000

_PLACE = ("file", "tensor")
_COLUMNS = {
    *("layer", "expert", "projection", "part", "row", "column", "source_value", "value", "steps"),
    *("level", "check", "message"),
}

# --- verdict and failures ---------------------------------------------------------------


def name_of(path: Any) -> str:
    return str(path).rstrip("/").rpartition("/")[2] if path else "no output"


def failure_count(result: Facts) -> int:
    """The count in the result, but at least the number of listed failures."""
    return max(int(finite(result["failure_count"]) or 0), len(items(result["failures"])))


def tone_of(result: Facts) -> str:
    """The CSS class of the verdict: passed only if the result says so and lists no failure."""
    passed = result["passed"]
    if failure_count(result) or (passed is not None and passed is not True):
        return "fail"
    return "pass" if passed is True else "skip"


def failure_groups(result: Facts) -> list[list[Facts]]:
    """Failures by level and check; lower levels first, since they often explain the others."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for item in items(result["failures"]):
        failure = Facts(item if isinstance(item, Mapping) else {"message": item})
        kind = (str(failure["level"]), str(failure["check"]))
        groups.setdefault(kind, []).append(Facts(failure, what=_what(failure)))
    order = {level: place for place, level in enumerate(LEVELS)}
    ranked = sorted(
        groups.items(), key=lambda item: (order.get(item[0][0], len(order)), -len(item[1]), item[0])
    )
    return [sorted(group, key=_badness, reverse=True) for _, group in ranked]


def _what(failure: Facts) -> Markup:
    """The message, and below it the place and all other fields."""
    places = [show_path(failure[name]) for name in _PLACE if failure[name] is not None]
    others = [
        f'<span class="code">{escape(name)}: {show_id(value)}</span>'
        for name, value in failure.items()
        if name not in {*_PLACE, *_COLUMNS} and value is not None
    ]
    below = "".join([*places, *others])
    return Markup(f'<div class="what">{show(failure["message"])}{below}</div>')


def _badness(failure: Facts) -> float:
    """The error in steps, or else in value; NaN comes first, unknown errors last."""
    steps = number(failure["steps"])
    if steps is not None:
        return math.inf if math.isnan(steps) else abs(steps)
    source, value = number(failure["source_value"]), number(failure["value"])
    if value is None:
        return -1.0
    distance = abs(value - (source or 0.0))
    return math.inf if math.isnan(distance) else distance


# --- layers -----------------------------------------------------------------------------


def isas_of(section: Facts) -> list[str]:
    """ISA levels: those of the section, then others that layers name."""
    named = [str(isa) for isa in items(section["isas"])]
    found = [str(isa) for row in records(section["layers"]) for isa in mapping(row["kernel_error"])]
    return list(dict.fromkeys(named + found))


def kernel_columns(isas: Sequence[str]) -> list[Column]:
    return [(f"kernel error, {isa}", ("kernel_error", isa), "error") for isa in isas]


def layer_rows(result: Facts) -> list[Facts]:
    """One row per layer with the results of levels weights and layers."""
    rows: dict[str, Facts] = {}
    for level in ("weights", "layers"):
        for layer in records(mapping(result[level])["layers"]):
            rows.setdefault(_label(layer), Facts()).update(layer)
    for row in rows.values():
        experts = items(row["experts"])
        row["sampled"] = sum(value is not None for value in experts) if experts else None
    return list(rows.values())


def weights_pictures(section: Facts) -> dict[str, Any]:
    layers = records(section["layers"])
    experts = [[number(value) for value in items(layer["experts"])] for layer in layers]
    values = [number(layer["relative_rms_error"]) for layer in layers]
    bands = [_spread(row) for row in experts]
    series = Series("all experts of the layer", values, bands, "least to greatest expert")
    return {"experts": _heat(layers, experts), "layers": _chart(layers, [series])}


def outputs_chart(section: Facts) -> dict[str, Any]:
    layers = records(section["layers"])
    series = [
        Series(name, [number(layer[key]) for layer in layers])
        for name, key in (
            ("quantization", "quantization_error"),
            ("quantization, with shared experts", "quantization_error_with_shared"),
        )
    ]
    for isa in isas_of(section):
        errors = [number(mapping(layer["kernel_error"])[isa]) for layer in layers]
        series.append(Series(f"kernel, {isa}", errors))
    return _chart(layers, series)


def gradient_rows(section: Facts) -> list[Facts]:
    """Errors of each layer's gradients, on every level and against the source's weights."""
    rows = []
    for layer in records(section["layers"]):
        found = mapping(layer["gradients"])
        for isa, errors in mapping(found["kernel_error"]).items():
            rows.append(Facts(mapping(errors), layer=layer["layer"], compared=f"kernels, {isa}"))
        if of_source := mapping(found["source_error"]):
            rows.append(Facts(of_source, layer=layer["layer"], compared="source's weights"))
    return rows


def compared_layers(result: Facts) -> list[Facts]:
    """Layers with the number of different matrices by projection as `counts`."""
    layers = records(result["layers"])
    for layer in layers:
        counts = mapping(layer["different"]).items()
        layer["counts"] = ", ".join(f"{count} {proj}" for proj, count in counts if count) or None
    return layers


def difference_pictures(layers: Sequence[Facts]) -> dict[str, Any]:
    values = [number(layer["relative_rms_difference"]) for layer in layers]
    experts = [_differences(records(layer["experts"])) for layer in layers]
    return {
        "layers": _chart(layers, [Series("all experts", values)]),
        "experts": _heat(layers, experts),
    }


def _differences(experts: Sequence[Facts]) -> list[float | None]:
    """Differences by expert; None for those that were not compared."""
    found = {}
    for one in experts:
        expert = one["expert"]
        if isinstance(expert, int) and 0 <= expert < _MOST_EXPERTS:
            found[expert] = number(one["relative_rms_difference"])
    return [found.get(expert) for expert in range(1 + max(found, default=-1))]


def _heat(layers: Sequence[Facts], experts: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    return heat_map([_label(layer) for layer in layers], experts)


def _chart(layers: Sequence[Facts], series: Sequence[Series]) -> dict[str, Any]:
    """Lines over the layers; empty if nothing was measured."""
    used = [one for one in series if any(value is not None for value in one.values)]
    if not used:
        return {}
    return line_chart([_label(layer) for layer in layers], _places(layers), used)


def _spread(row: Sequence[float | None]) -> tuple[float, float] | None:
    """The least and the greatest drawable value."""
    given = [value for value in row if value is not None and drawable(value)]
    return (min(given), max(given)) if len(given) > 1 else None


def _label(layer: Facts) -> str:
    value = layer["layer"]
    return "?" if value is None else str(value)


def _places(layers: Sequence[Facts]) -> list[float]:
    """Places of layers on the axis: their numbers, or their order if these are unusable."""
    places = [number(layer["layer"]) for layer in layers]
    usable = [place for place in places if place is not None and 0 <= place < 100_000]
    if len(usable) < len(places) or usable != sorted(set(usable)):
        return [float(index) for index in range(len(places))]
    return usable


# --- model ------------------------------------------------------------------------------


def drift_chart(model: Facts) -> dict[str, Any]:
    layers = records(model["layers"])
    series = [
        Series(name, [number(layer[key]) for layer in layers])
        for name, key in (("all tokens", "relative_error"), ("mean of tokens", "token_error"))
    ]
    return _chart(layers, series)


def perplexity_change(model: Facts) -> str | None:
    source, converted = (number(model[f"perplexity_{side}"]) for side in ("source", "converted"))
    if not (source and converted and drawable(source) and drawable(converted)):
        return None
    return f"{(converted / source - 1) * 100:+.2f} %".replace("-", "−")


def measures_of(model: Facts) -> list[Facts]:
    """Measures with their limits, then all other limits."""
    limits = dict(mapping(model["thresholds"]))
    rows = [
        {"name": words, "value": model[name], "limit": limits.pop(limit, None)}
        for name, words, limit in _MEASURES
    ]
    rows += [{"name": str(name), "limit": limit} for name, limit in limits.items()]
    return [Facts(row) for row in rows]


def texts_of(generation: Facts) -> dict[str, Any]:
    """Both texts, marked from their first difference on, and where it is (None: one is missing)."""
    source, converted = generation["source"], generation["converted"]
    if not isinstance(source, str) or not isinstance(converted, str):
        return {"source": source, "converted": converted, "shared": None}
    pairs = zip(source, converted, strict=False)
    shared = next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(len(source), len(converted))
    )
    marked = {side: _marked(generation[side], shared) for side in ("source", "converted")}
    return {**marked, "shared": counted(shared, "character"), "same": source == converted}


def _marked(text: str, shared: int) -> Markup:
    if shared >= len(text):
        return show(text)
    return escape(text[:shared]) + Markup("<mark>{}</mark>").format(escape(text[shared:]))


# --- provenance -------------------------------------------------------------------------


def flat(value: Any, name: str = "", depth: int = 0) -> list[tuple[str, Markup]]:
    """Nested facts as a list with names such as a.b; long lists become their length."""
    if isinstance(value, Mapping) and value and depth < 4 and len(value) <= _MAX_ENTRIES:
        return [
            pair
            for inner, content in value.items()
            for pair in flat(content, f"{name}.{inner}" if name else str(inner), depth + 1)
        ]
    if isinstance(value, (Mapping, list, tuple)):
        if len(value) > _MAX_ENTRIES or any(isinstance(item, (Mapping, list)) for item in value):
            count = counted(len(value), "value")
            return [(name, Markup(f'<span class="soft">{count}</span>'))]
        shown = Markup(", ").join(show_id(item) for item in value) if value else show([*value])
        return [(name, shown)]
    return [(name, show_id(value))]
