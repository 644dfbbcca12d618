"""`ktconv verify`: options in; facts, lines for people and the verdict out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconv.errors import KtconvError, UsageError
from ktconv.system.files import check_writable, write_durably
from ktconv.system.units import format_size
from ktconv.verify.findings import Progression
from ktconv.verify.gpu.lines import layers_line, mapping_lines
from ktconv.verify.memory import Budget, Need, memory_facts, plan_memory
from ktconv.verify.request import Thresholds, VerifyRequest
from ktconv.verify.run import Result, prepare, verify

SHOWN = 10  # failures on the terminal; --json and --report have more


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    output: Path
    other: Path | None = None
    source: str | None = None
    level: str | None = None
    sample: float = 1.0
    seed: int = 0
    threads: int | None = None
    tokens: int = 16
    text: Path | None = None
    windows: int = 40
    max_ppl_increase: float | None = None
    max_kl: float | None = None
    beside: Path | None = None
    tp: Sequence[int] | None = None
    ep: Sequence[int] | None = None
    report: Path | None = None
    max_memory: int | None = None


Outcome = tuple[dict[str, Any], list[str], bool]


def run(options: Options, progression: Progression, say: Callable[[str], None]) -> Outcome:
    """Raises KtconvError where the verification cannot be run."""
    _check_report(options.report)
    if options.other is not None:
        outcome = _compare(options, options.other, progression, say)
    else:
        outcome = _verify(options, progression, say)
    if options.report is not None:
        _write_report(options.report, outcome, say)
    return outcome


def _verify(options: Options, progression: Progression, say: Callable[[str], None]) -> Outcome:
    request = VerifyRequest(
        output=options.output,
        source=options.source,
        level=options.level,
        sample=options.sample,
        seed=options.seed,
        threads=options.threads,
        tokens=options.tokens,
        text=options.text,
        windows=options.windows,
        thresholds=Thresholds(options.max_ppl_increase, options.max_kl),
        beside=options.beside,
        tp=options.tp,
        ep=options.ep,
        max_memory=options.max_memory,
    )
    ready = prepare(request)
    _announce(ready.budget, say)
    result = verify(request, progression, ready, say)
    return in_json(result.facts), list(lines_of(result)), result.passed


def _announce(budget: Budget, say: Callable[[str], None]) -> None:
    say(f"memory: up to {format_size(budget.peak)} with {budget.threads} thread(s)")


def _compare(
    options: Options, other: Path, progression: Progression, say: Callable[[str], None]
) -> Outcome:
    from ktconv.verify.compare import make_plan, sizes_of, thread_bytes
    from ktconv.verify.compare import run as compare_planned

    for name in ("source", "level", "text", "max_ppl_increase", "max_kl", "beside", "tp", "ep"):
        if getattr(options, name) is not None:
            option = "with" if name == "beside" else name.replace("_", "-")
            raise UsageError(
                f"--{option} has no meaning where two conversions are compared",
                "leave it out, or verify each against its --source",
            )
    plan = make_plan(options.output, other, options.sample, options.seed)
    budget = plan_memory(Need(thread_bytes(plan)), options.max_memory, options.threads, None)
    _announce(budget, say)
    with progression(sizes_of(plan)) as observer:
        found = compare_planned(plan, budget.threads, observer)
    return found.as_dict() | memory_facts(budget), list(found.lines()), found.equal


def _check_report(path: Path | None) -> None:
    """Before an hour of work: can the report be written?"""
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--report {path} is no HTML file", "end it with .html")
    check_writable(path, "--report")


def _write_report(path: Path, outcome: Outcome, say: Callable[[str], None]) -> None:
    """In one step, or not at all; what was found is told even if the disk is full."""
    from ktconv.verify.report import render_report

    facts, lines, _ = outcome
    try:
        write_durably(path, render_report(facts).encode(), path.absolute().parent)
    except KtconvError:
        for line in lines:
            say(line)
        raise


def in_json(value: Any) -> Any:
    """JSON has no numbers for what is not finite: "nan", "inf" and "-inf" in their place."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: in_json(inner) for name, inner in value.items()}
    return [in_json(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# ---- for people ----


def lines_of(result: Result) -> Iterator[str]:
    """The verdict, the worst offenders first, then a line or two per level."""
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
        yield from mapping_lines(facts["mapping"], _mark(facts["mapping"]))
    for note in facts["notes"]:
        yield f"note: {note}"
    verdict = "holds" if result.passed else f"FAILS: {facts['failure_count']} failure(s)"
    yield f"{facts['output']} {verdict} (level {facts['level']}, {facts['seconds']:.1f} s)"


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
        f"coverage   {_mark(about)}: of {about['experts']} experts in {about['layers']} layers "
        f"{about['experts_here']} are here, {about['experts_there']} in {about['with']}"
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
    """NaN is worse than everything."""
    return math.inf if math.isnan(error) else error


def _layers(about: Mapping[str, Any]) -> Iterator[str]:
    rows = about["layers"]
    if not about["isas"]:
        yield layers_line(about, _mark(about))
        return
    kernel = max((error for row in rows for error in row["kernel_error"].values()), key=_badness)
    worst = max(rows, key=lambda row: _badness(row["quantization_error"]))
    yield (
        f"layers     {_mark(about)}: {len(rows)} layers on {', '.join(about['isas'])}, "
        f"{about['tokens']} tokens of {about['states_are']}: kernels within {kernel:.2g} of "
        f"float32 ({about['kernel_bound']:g} allowed)"
    )
    yield (
        f"           output off by {worst['quantization_error']:.4f} from the source's at most "
        f"(layer {worst['layer']}; worst expert {worst['worst_expert']['expert']}: "
        f"{worst['worst_expert']['error']:.4f})"
    )


def _model(about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"model      {_mark(about)}: perplexity {about['perplexity_source']:.3f} -> "
        f"{about['perplexity_converted']:.3f} ({100 * about['perplexity_increase']:+.2f} %), "
        f"KL mean {about['kl_mean']:.4f}, 99th percentile {about['kl_p99']:.4f}, the same next "
        f"token at {100 * about['top1_agreement']:.1f} % of {about['tokens']} positions of "
        f"{about['text']}"
    )
    yield f"           source writes    {about['generation']['source']!r}"
    yield f"           converted writes {about['generation']['converted']!r}"
