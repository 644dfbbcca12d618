"""The levels in order, each with the ones before; see `verify`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ktconv import __version__
from ktconv.errors import KtconvError, UsageError
from ktconv.reading.reader import SourceReader
from ktconv.verify.findings import Failure, Findings, Progression
from ktconv.verify.hidden_states import why_not_captured
from ktconv.verify.kinds import Kind, kind_of
from ktconv.verify.memory import Budget, memory_facts, plan_memory
from ktconv.verify.reading import Context
from ktconv.verify.request import LEVELS, VerifyRequest
from ktconv.verify.runner import Item, read_everything
from ktconv.verify.subject import Subject
from ktconv.verify.text import read_text


def silent(sizes: dict[str, int]) -> AbstractContextManager[Any]:
    """A progression that tells nobody."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Prepared:
    """An opened subject, and what there is to do: for progress."""

    request: VerifyRequest
    level: str
    kind: Kind
    subject: Subject
    budget: Budget
    findings: Findings
    items: Sequence[Item]
    structure: Mapping[str, Any]
    more: Mapping[str, Any]  # facts that only this kind has; None: not asked for

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes to read by unit."""
        found: dict[str, int] = {}
        for item in self.items:
            found[item.unit] = found.get(item.unit, 0) + item.nbytes
        return found


@dataclass(frozen=True, slots=True)
class Result:
    """All that was found. `facts` is the document of `verify --json`, but for numbers that are
    not finite, which JSON lacks."""

    passed: bool
    failures: Sequence[Failure]
    facts: Mapping[str, Any]


def prepare(request: VerifyRequest) -> Prepared:
    """Opens everything and checks what headers tell. Raises KtconvError if it cannot be run."""
    level = _level(request)
    if not 0 < request.sample <= 1:
        raise UsageError(f"--sample {request.sample} is no share", "give more than 0, at most 1")
    if request.text is not None:
        read_text(request.text)  # a KtconvError now, not after an hour of reading
    kind = kind_of(request.output)
    subject = kind.open_output(request.output, request.source)
    kind.refuse_impossible(level, subject, request)
    findings = Findings()
    more = kind.check_more(subject, request, findings)
    structure = kind.check_structure(subject, findings)
    reader = None
    if subject.checkpoint is not None:
        reader = SourceReader(subject.checkpoint.files, subject.checkpoint.sources)
    compare = reader is not None and level != "structure"
    context = Context(subject, findings, subject.checksums(), reader, compare, subject.claims())
    items = kind.items_of(context, request.sample, request.seed)
    budget = _budget(request, level, kind, subject)
    return Prepared(request, level, kind, subject, budget, findings, items, structure, more)


def _budget(request: VerifyRequest, level: str, kind: Kind, subject: Subject) -> Budget:
    need = kind.memory_need(level, subject, request)
    why_not = why_not_captured(subject) if need.layers else None
    return plan_memory(need, request.max_memory, request.threads, why_not)


def _level(request: VerifyRequest) -> str:
    if request.level is None:
        return "layers" if request.source else "structure"
    if request.level not in LEVELS:
        raise UsageError(f"there is no level {request.level!r}", f"levels: {', '.join(LEVELS)}")
    if request.level != "structure" and not request.source:
        raise UsageError(
            f"--level {request.level} compares with the source",
            "name the checkpoint that was converted with --source MODEL",
        )
    return request.level


def verify(
    request: VerifyRequest,
    progression: Progression = silent,
    prepared: Prepared | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Runs all levels up to the wanted one. `say` is told which begins; `progression` makes an
    observer from sizes of units, first for what is read, then for the layers that are computed.

    Raises KtconvError where something cannot be run at all; what does not hold is a failure of
    the result.
    """
    started = time.monotonic()
    ready = prepared or prepare(request)
    with progression(ready.sizes) as observer:
        sizes = ready.kind.buffer_sizes(ready.subject)
        totals = read_everything(ready.items, sizes, ready.budget.threads, observer)
    reached = LEVELS.index(ready.level)
    structure = dict(ready.structure) | {
        "bytes_checked": totals.bytes_checked,
        "checksums": totals.checksums,
        "copied_tensors": totals.copied_tensors,
    }
    levels: dict[str, Any] = {
        "structure": structure,
        "weights": None,
        "layers": None,
        "model": None,
        **ready.more,
    }
    if reached >= 1:
        levels["weights"] = ready.kind.weights_facts(totals, ready.subject)
    if reached >= 2 and _can_compute(ready):
        for name in LEVELS[2 : reached + 1]:
            try:
                levels[name] = _compute(name, ready, progression, say)
            except KtconvError as error:
                if not ready.findings.count():
                    raise
                # What was found wrong explains it, and must be told.
                ready.findings.note(f"level {name} could not be run: {error}")
                break
    return _result(ready, levels, time.monotonic() - started)


def _compute(
    name: str, ready: Prepared, progression: Progression, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Level layers or model."""
    kind, subject, findings = ready.kind, ready.subject, ready.findings
    if name == "layers":
        return kind.check_layers(subject, ready.request, ready.budget, findings, progression, say)
    return kind.check_model(subject, ready.request, findings, say)


def _can_compute(ready: Prepared) -> bool:
    """Whether every tensor is there: else kernels have nothing to run on."""
    if not ready.findings.count("structure"):
        return True
    ready.findings.note("levels layers and model were not run: the structure does not hold")
    return False


def _result(ready: Prepared, levels: dict[str, Any], seconds: float) -> Result:
    findings, request, subject = ready.findings, ready.request, ready.subject
    for name, about in levels.items():
        if about is not None:
            about["passed"] = findings.count(name) == 0
    manifest = subject.manifest
    origin = {key: manifest.get(key) for key in _ORIGIN} if manifest else None
    facts = {
        "schema": 1,
        "kind": "verification",
        "ktconv_version": __version__,
        "passed": findings.count() == 0,
        "level": ready.level,
        "output": str(subject.directory),
        "source": str(subject.checkpoint.path) if subject.checkpoint else None,
        **subject.described,
        "sample": request.sample,
        "seed": request.seed,
        "seconds": round(seconds, 3),
        **memory_facts(ready.budget),
        "failure_count": findings.count(),
        "failures": [failure.as_dict() for failure in findings.listed],
        "notes": list(findings.notes),
        **levels,
        "provenance": {"manifest": origin, "machine": _machine()},
    }
    return Result(findings.count() == 0, findings.listed, facts)


_ORIGIN = ("ktconv_version", "options", "source", "geometry")


def _machine() -> dict[str, Any]:
    from ktconv.bench.fingerprint import fingerprint

    return fingerprint()
