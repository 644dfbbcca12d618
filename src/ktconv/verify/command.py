"""`ktconv verify`: from a request to facts, lines for people and the verdict."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconv.errors import KtconvError, UsageError
from ktconv.system.text import Notify
from ktconv.system.units import counted, format_size
from ktconv.verify.card import check_card, write_card
from ktconv.verify.findings import Progression
from ktconv.verify.memory import Budget, Need, memory_facts, plan_memory
from ktconv.verify.request import VerifyRequest
from ktconv.verify.run import Reading, prepare, verify
from ktconv.verify.runner import sizes_by_unit
from ktconv.verify.text import lines_of
from ktconv.writer.option_files import WrittenFile, check_written

_REPORT = '<meta name="generator" content="ktconv">'  # in the head of every report
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
    written = None if report is None else report_file(report)
    check_written([written], _read(request, other))
    if card:
        check_card(request.output)
    if other is not None:
        outcome = _compare(request, other, progression, notify)
    else:
        ready = prepare(request)
        _announce(ready.budget, notify)
        for line in ready.model.lines if ready.model else ():
            notify(line)
        result = verify(request, progression, ready, notify, read)
        outcome = in_json(result.facts), list(lines_of(result)), result.passed
    if written is not None:
        _write_report(written, outcome, notify)
    if card:
        write_card(request.output, outcome[0])
    return outcome


def _announce(budget: Budget, notify: Notify) -> None:
    notify(f"memory: up to {format_size(budget.peak)} with {counted(budget.threads, 'thread')}")


def _compare(
    request: VerifyRequest, other: Path, progression: Progression, notify: Notify
) -> Outcome:
    from ktconv.verify import compare

    if os.path.realpath(request.output) == os.path.realpath(other):  # resolve() raises for circles
        raise UsageError(f"{other} is given twice", "give another conversion of the same model")
    plan = compare.make_plan(request.output, other, request.sample, request.seed)
    need = Need(max((task.memory for task in plan.tasks), default=0))
    budget = plan_memory(need, request.max_memory, request.threads, None)
    _announce(budget, notify)
    with progression(sizes_by_unit(plan.tasks)) as observer:
        found = compare.run(plan, budget.threads, observer)
    return found.as_dict() | memory_facts(budget), list(found.lines()), found.equal


def report_file(path: Path) -> WrittenFile:
    """FILE of --report. UsageError if it does not end in .html."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--report {path} does not end in .html", "name a .html file")
    return WrittenFile(path, "--report", "a report that ktconv wrote", _is_report)


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return _REPORT.encode() in file.read(4096)


def _read(request: VerifyRequest, other: Path | None) -> list[str | Path | None]:
    """Inputs of the command, to which no option may write."""
    return [
        request.output, other, request.beside, request.importance, request.calibrate, request.text,
        *(request.original.files() if request.original else ()),
    ]  # fmt: skip


def _write_report(file: WrittenFile, outcome: Outcome, notify: Notify) -> None:
    """Writes the report atomically; prints the lines if that fails, as on a full disk."""
    from ktconv.verify.report import render_report

    facts, lines, _ = outcome
    try:
        file.write(render_report(facts).encode())
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
