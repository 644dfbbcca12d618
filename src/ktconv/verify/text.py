"""The result of a verification as lines for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ktconv.system.units import format_size
from ktconv.verify.run import Result

SHOWN = 10  # failures; --json and --report have more


def lines_of(result: Result) -> Iterator[str]:
    """The worst failures, a line or two per level, notes, and the verdict."""
    facts = result.facts
    yield from _failures(result)
    yield from _structure(facts["structure"])
    if facts.get("coverage"):
        yield from _coverage(facts["coverage"])
    if facts["weights"]:
        yield from _weights(facts["weights"], facts["sample"])
    if facts["layers"]:
        yield from _layers(facts["layers"])
    if facts["model"]:
        yield from _model(facts["model"])
    if facts.get("mapping"):
        yield from _mapping(facts["mapping"])
    for note in facts["notes"]:
        yield f"note: {note}"
    count = facts["failure_count"]
    verdict = "OK, verified" if result.passed else f"FAILED with {count} failure(s), verified"
    yield f"{facts['output']}: {verdict} to level {facts['level']} in {facts['seconds']:.1f} s"


def _failures(result: Result) -> Iterator[str]:
    for failure in result.failures[:SHOWN]:
        yield f"{failure.level}, {failure.check}: {failure.message}"
    more = result.facts["failure_count"] - min(SHOWN, len(result.failures))
    if more:
        yield f"... and {more} more failure(s): --json or --report lists them"


def _mark(about: Mapping[str, Any]) -> str:
    return "ok" if about["passed"] else "FAILED"


def _structure(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"structure  {_mark(about)}: {about['tensors_found']} of {about['tensors_expected']} "
        f"tensors in {about['files']} files, {about['checksums']} checksums, "
        f"{about['copied_tensors']} copies, {format_size(about['bytes_checked'])} read"
    )


def _coverage(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"coverage   {_mark(about)}: of {about['experts']} experts in "
        f"{about['layers']} layers {about['experts_here']} are in this output, "
        f"{about['experts_there']} in {about['with']}"
    )


def _weights(about: Mapping[str, Any], sample: float) -> Iterator[str]:
    part = "" if sample >= 1 else f" (a sample of {sample:g})"
    yield (
        f"weights    {_mark(about)}: {about['matrices']} matrices{part}, relative RMS error "
        f"{about['relative_rms_error']:.4f} over all weights, "
        f"cosine {about['cosine']:.6f}, at most {about['max_error_steps']:.4f} steps "
        f"off{_allowed(about['bound_steps'])}, {100 * about['zero_share']:.1f} % zeros"
    )
    if about["worst"]:
        worst = about["worst"][0]
        yield (
            f"           worst: layer {worst['layer']}, expert {worst['expert']}, "
            f"{worst['projection']}: {worst['relative_rms_error']:.4f}"
        )


def _allowed(bound: float | None) -> str:
    return "" if bound is None else f" ({bound:.4f} allowed)"


def _badness(error: float) -> float:
    """NaN counts as the worst error."""
    return math.inf if math.isnan(error) else error


def _layers(about: Mapping[str, Any]) -> Iterator[str]:
    rows, where, kernels = about["layers"], "in float32", ""
    if about["isas"]:
        errors = (error for row in rows for error in row["kernel_error"].values())
        where = f"on {', '.join(about['isas'])}"
        kernels = (
            f": kernels within {max(errors, key=_badness):.2g} of float32 "
            f"({about['kernel_bound']:g} allowed)"
        )
    yield (
        f"layers     {_mark(about)}: {len(rows)} layers {where}, {about['tokens']} tokens of "
        f"{about['states_are']}{kernels}"
    )
    worst = max(rows, key=lambda row: _badness(row["quantization_error"]))
    yield (
        "           max output error vs. source: "
        f"{worst['quantization_error']:.4f} (layer {worst['layer']}; worst expert "
        f"{worst['worst_expert']['expert']}: {worst['worst_expert']['error']:.4f})"
    )


def _model(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"model      {_mark(about)}: perplexity {about['perplexity_source']:.3f} "
        f"-> {about['perplexity_converted']:.3f} "
        f"({100 * about['perplexity_increase']:+.2f} %), KL mean "
        f"{about['kl_mean']:.4f}, 99th percentile {about['kl_p99']:.4f}, same "
        f"next token at {100 * about['top1_agreement']:.1f} % of "
        f"{about['tokens']} positions of {about['text']}"
    )
    yield f"           source output:    {about['generation']['source']!r}"
    yield f"           converted output: {about['generation']['converted']!r}"


def _mapping(about: Mapping[str, Any]) -> Iterator[str]:
    """Slots, then possible sizes, and the reasons why others are not."""
    count = f"{about['slots']} tensors of {about['experts']} experts"
    yield f"mapping    {_mark(about)}: {count}, one per slot"
    for kind in ("tensor", "expert"):
        rows = about[f"{kind}_parallel"]
        possible = [str(row["size"]) for row in rows if row["possible"]]
        yield f"           {kind} parallel on {', '.join(possible) or 'no number of'} GPUs"
        for row in rows:
            if not row["possible"]:
                yield f"           not on {row['size']}: {row['reason']}"
