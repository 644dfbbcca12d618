"""The result of a verification as lines for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ktconv.system.units import counted, format_size
from ktconv.verify.run import Result

SHOWN = 10  # failures; --json and --report have more
LAYERS_SHOWN = 12


def lines_of(result: Result) -> Iterator[str]:
    """The worst failures, a line or two per level, notes, and the verdict."""
    facts = result.facts
    for failure in result.failures[:SHOWN]:
        yield f"{failure.level}, {failure.check}: {failure.message}"
    more = facts["failure_count"] - min(SHOWN, len(result.failures))
    if more:
        yield f"... and {counted(more, 'more failure')}: --json or --report lists them"
    for level, (first, *others) in levels_in_words(facts):
        yield f"{level:<10} {'ok' if facts[level]['passed'] else 'FAILED'}: {first}"
        yield from (f"{'':<11}{line}" for line in others)
    for note in facts["notes"]:
        yield f"note: {note}"
    count = facts["failure_count"]
    failed = f"FAILED with {counted(count, 'failure')}, verified"
    verdict = "OK, verified" if result.passed else failed
    yield f"{facts['output']}: {verdict} to level {facts['level']} in {facts['seconds']:.1f} s"


def levels_in_words(facts: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each level that was run with its lines, the most important one first."""
    for level, words in _SECTIONS.items():
        if about := facts.get(level):
            yield level, list(words({"sample": facts["sample"], **about}))


def _structure(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{about['tensors_found']} of {counted(about['tensors_expected'], 'tensor')} in "
        f"{counted(about['files'], 'file')}, {counted(about['checksums'], 'checksum')}, "
        f"{counted(about['copied_tensors'], 'copy')}, "
        f"{format_size(about['bytes_checked'])} read"
    )


def _coverage(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"of {counted(about['experts'], 'expert')} in {counted(about['layers'], 'layer')} "
        f"{about['experts_here']} are in this output, {about['experts_there']} in {about['with']}"
    )


def _weights(about: Mapping[str, Any]) -> Iterator[str]:
    sample, bound = about["sample"], about["bound_steps"]
    part = "" if sample >= 1 else f" (a sample of {sample:g})"
    allowed = f" ({bound:.4f} allowed)" if bound is not None else ""
    yield (
        f"{counted(about['matrices'], 'matrix')}{part}, relative RMS error "
        f"{about['relative_rms_error']:.4f} over all weights, cosine {about['cosine']:.6f}, at "
        f"most {about['max_error_steps']:.4f} steps off{allowed}, "
        f"{100 * about['zero_share']:.1f} % zeros"
    )
    if backward := about.get("backward"):
        yield (
            f"{backward['matrices']} backward matrices{part}, relative RMS error "
            f"{backward['relative_rms_error']:.4f}, at most {backward['max_error_steps']:.4f} "
            "steps off"
        )
    if "codes_by" in about:
        yield f"codes by {about['codes_by']}"
    yield from (f"not proven: {sentence}" for sentence in about.get("unproven", ()))
    for worst in about["worst"][:1]:
        yield (
            f"worst: layer {worst['layer']}, expert {worst['expert']}, {worst['projection']}: "
            f"{worst['relative_rms_error']:.4f}"
        )


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
        f"{counted(len(rows), 'layer')} {where}, {counted(about['tokens'], 'token')} of "
        f"{about['states_are']}{kernels}"
    )
    worst = max(rows, key=lambda row: _badness(row["quantization_error"]))
    yield (
        f"max output error vs. source: {worst['quantization_error']:.4f} (layer {worst['layer']}; "
        f"worst expert {worst['worst_expert']['expert']}: {worst['worst_expert']['error']:.4f})"
    )
    yield from _gradients([row["gradients"] for row in rows if "gradients" in row])


def _gradients(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The result with LoRA and its gradients, of --gradients: the error closest to its bound."""
    if not found:
        return
    of_kernels = [
        (error, row["bounds"][name], name)
        for row in found
        for errors in row["kernel_error"].values()
        for name, error in errors.items()
    ]
    error, bound, name = max(of_kernels, key=lambda one: _badness(one[0] / one[1]))
    yield (
        f"gradients of LoRA, worst {name}: within {error:.2g} of float32 autograd "
        f"({bound:g} allowed)"
    )
    of_source = [row["source_error"] for row in found if row["source_error"]]
    if of_source:
        worst = {key: max((one[key] for one in of_source), key=_badness) for key in of_source[0]}
        errors = ", ".join(f"{key} {value:.4f}" for key, value in worst.items() if key != "y")
        yield f"max error of gradients vs. source: {errors}"


def _model(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"perplexity {about['perplexity_source']:.3f} -> {about['perplexity_converted']:.3f} "
        f"({100 * about['perplexity_increase']:+.2f} %), KL mean {about['kl_mean']:.4f}, 99th "
        f"percentile {about['kl_p99']:.4f}, same next token at "
        f"{100 * about['top1_agreement']:.1f} % of {about['tokens']} positions of {about['text']}"
    )
    if whole := about.get("unpruned"):
        yield (
            f"with all experts: perplexity {whole['perplexity_source']:.3f} -> "
            f"{whole['perplexity_converted']:.3f} ({100 * whole['perplexity_increase']:+.2f} %), "
            f"KL mean {whole['kl_mean']:.4f}, same next token at "
            f"{100 * whole['top1_agreement']:.1f} %"
        )
    yield from _drift(about["layers"])
    if written := about["generation"]:
        yield f"source output:    {written['source']!r}"
        yield f"converted output: {written['converted']!r}"


def _drift(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines on how far hidden states are apart: all layers if they are few, else every nth, the
    last, the worst, and the one that adds most to what was there before."""
    if not rows:
        return
    errors = [_badness(row["token_error"]) for row in rows]
    marks: dict[int, list[str]] = {}
    marks.setdefault(max(range(len(rows)), key=errors.__getitem__), []).append("worst")
    later = [index for index in range(1, len(rows)) if errors[index - 1] > 0]
    if later:
        most = max(later, key=lambda index: errors[index] - errors[index - 1])
        marks.setdefault(most, []).append("adds most")
    every = 1 if len(rows) <= LAYERS_SHOWN else -(-len(rows) // (LAYERS_SHOWN - 2))
    yield "hidden states, converted against source: relative error, mean of tokens, cosine"
    for index in sorted({*range(0, len(rows), every), *marks, len(rows) - 1}):
        row = rows[index]
        yield (
            f"layer {row['layer']:>3}  {row['relative_error']:.4f}  {row['token_error']:.4f}  "
            f"{row['cosine']:.6f}  {', '.join(marks.get(index, ()))}"
        ).rstrip()


def _mapping(about: Mapping[str, Any]) -> Iterator[str]:
    """Slots, then possible sizes, and the reasons why others are not."""
    experts = counted(about["experts"], "expert")
    yield f"{counted(about['slots'], 'tensor')} of {experts}, one per slot"
    for kind in ("tensor", "expert"):
        rows = about[f"{kind}_parallel"]
        possible = [str(row["size"]) for row in rows if row["possible"]]
        yield f"{kind} parallel on {', '.join(possible) or 'no number of'} GPUs"
        yield from (f"not on {row['size']}: {row['reason']}" for row in rows if not row["possible"])


_SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "structure": _structure,
    "coverage": _coverage,
    "weights": _weights,
    "layers": _layers,
    "model": _model,
    "mapping": _mapping,
}
