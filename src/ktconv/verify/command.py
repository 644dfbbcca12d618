"""`ktconv verify`: from a request to facts, lines for people and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconv.errors import KtconvError, UsageError
from ktconv.system.files import check_writable, write_durably
from ktconv.system.text import Notify
from ktconv.system.units import counted, format_size
from ktconv.verify.card import check_card, write_card
from ktconv.verify.findings import Progression
from ktconv.verify.memory import Budget, Need, memory_facts, plan_memory
from ktconv.verify.request import VerifyRequest
from ktconv.verify.run import Reading, prepare, verify
from ktconv.verify.runner import sizes_by_unit
from ktconv.verify.text import lines_of

Outcome = tuple[dict[str, Any], list[str], bool]


def run(
    request: VerifyRequest,
    progression: Progression,
    notify: Notify,
    other: Path | None = None,
    report: Path | None = None,
    read: Reading | None = None,
    card: bool = False,
) -> Outcome:
    """Verifies, or compares with `other`; `read`: see `verify`. With `card`, the output's model
    card gets the figures. Raises KtconvError where that is not possible."""
    check_report(report)
    if card:
        _check_card(request, other)
    if other is not None:
        outcome = _compare(request, other, progression, notify)
    else:
        ready = prepare(request)
        _announce(ready.budget, notify)
        for line in ready.model.lines if ready.model else ():
            notify(line)
        result = verify(request, progression, ready, notify, read)
        outcome = in_json(result.facts), list(lines_of(result)), result.passed
    if report is not None:
        _write_report(report, outcome, notify)
    if card:
        write_card(request.output, outcome[0])
    return outcome


def _announce(budget: Budget, notify: Notify) -> None:
    notify(f"memory: up to {format_size(budget.peak)} with {counted(budget.threads, 'thread')}")


def _compare(
    request: VerifyRequest, other: Path, progression: Progression, notify: Notify
) -> Outcome:
    from ktconv.verify import compare

    for option, value in (
        ("source", request.source),
        ("config", request.config),
        ("map", request.map),
        ("tower", request.tower),
        ("importance", request.importance),
        ("calibrate", request.calibrate),
        ("level", request.level),
        ("gradients", request.gradients or None),
        ("text", request.text),
        ("work-dir", request.work_dir),
        ("max-ppl-increase", request.thresholds.max_ppl_increase),
        ("max-kl", request.thresholds.max_kl),
        ("with", request.beside),
        ("tp", request.tp),
        ("ep", request.ep),
    ):
        if value is not None:
            raise UsageError(
                f"--{option} does not apply when comparing two conversions",
                "omit it, or verify each against its --source",
            )
    plan = compare.make_plan(request.output, other, request.sample, request.seed)
    need = Need(max((task.memory for task in plan.tasks), default=0))
    budget = plan_memory(need, request.max_memory, request.threads, None)
    _announce(budget, notify)
    with progression(sizes_by_unit(plan.tasks)) as observer:
        found = compare.run(plan, budget.threads, observer)
    return found.as_dict() | memory_facts(budget), list(found.lines()), found.equal


def check_report(path: Path | None) -> None:
    """Raises KtconvError for a report that cannot be written, before an hour of work."""
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--report {path} does not end in .html", "name a .html file")
    check_writable(path, "--report")


def _check_card(request: VerifyRequest, other: Path | None) -> None:
    if other is not None or not request.source:
        what = "when comparing two conversions" if other is not None else "without --source"
        raise UsageError(
            f"--card does not apply {what}", "omit it, or verify OUTPUT against its --source"
        )
    check_card(request.output)


def _write_report(path: Path, outcome: Outcome, notify: Notify) -> None:
    """Writes the report atomically; prints the lines if that fails, as on a full disk."""
    from ktconv.verify.report import render_report

    facts, lines, _ = outcome
    try:
        write_durably(path, render_report(facts).encode(), path.absolute().parent)
    except KtconvError:
        for line in lines:
            notify(line)
        raise


def in_json(value: Any) -> Any:
    """The value with "nan", "inf" and "-inf" as strings, since JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: in_json(inner) for name, inner in value.items()}
    return [in_json(inner) for inner in value] if isinstance(value, (list, tuple)) else value
