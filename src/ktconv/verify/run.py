"""The levels in order, each with the ones before; see `verify`."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv import __version__, machine
from ktconv.copying import Buffers
from ktconv.errors import KtconvError, UsageError
from ktconv.source import SourceReader
from ktconv.verify.cover import LEVEL as COVERAGE
from ktconv.verify.cover import check_cover
from ktconv.verify.findings import Failure, Findings
from ktconv.verify.reading import Context
from ktconv.verify.structure import check_structure
from ktconv.verify.subject import Subject, open_subject
from ktconv.verify.text import read_text
from ktconv.verify.totals import Done, Totals
from ktconv.verify.weights import Item, buffer_sizes, items_of

if TYPE_CHECKING:
    from ktconv.pipeline import Observer

Progression = Callable[[dict[str, int]], AbstractContextManager[Any]]

LEVELS = ("structure", "weights", "layers", "model")


def silent(sizes: dict[str, int]) -> AbstractContextManager[Any]:
    """A progression that tells nobody."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What level model accepts; None: the method's default."""

    max_ppl_increase: float | None = None  # relative: 0.02 is 2 %
    max_kl: float | None = None  # mean, in nats


@dataclass(frozen=True, slots=True)
class Request:
    """What to verify and how thoroughly. Without a source only level structure is possible."""

    output: Path
    source: str | None = None
    level: str | None = None  # None: layers, or structure without a source
    sample: float = 1.0  # share of experts and of other tensors whose bytes are read
    seed: int = 0
    threads: int | None = None
    tokens: int = 16  # of level layers, per layer
    text: Path | None = None  # None: the text that ships with ktconv
    windows: int = 40  # of 512 tokens, of level model
    beside: Path | None = None  # an output that must hold the experts that this one lacks
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An opened subject, and what there is to do: for progress."""

    request: Request
    level: str
    subject: Subject
    findings: Findings
    items: Sequence[Item]
    structure: Mapping[str, Any]
    coverage: Mapping[str, Any] | None  # None: not asked for

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


def prepare(request: Request) -> Prepared:
    """Opens everything and checks what headers tell. Raises KtconvError if it cannot be run."""
    level = _level(request)
    if not 0 < request.sample <= 1:
        raise UsageError(f"--sample {request.sample} is no share", "give more than 0, at most 1")
    subject = open_subject(request.output, request.source)
    _refuse_impossible(level, subject, request)
    findings = Findings()
    coverage = check_cover(subject, request.beside, findings) if request.beside else None
    structure = check_structure(subject, findings)
    reader = None
    if subject.checkpoint is not None:
        reader = SourceReader(subject.checkpoint.files, subject.checkpoint.sources)
    compare = reader is not None and level != "structure"
    context = Context(subject, findings, subject.checksums(), reader, compare)
    items = items_of(context, request.sample, request.seed)
    return Prepared(request, level, subject, findings, items, structure, coverage)


def _refuse_impossible(level: str, subject: Subject, request: Request) -> None:
    """What cannot be run is told now, not after an hour of reading."""
    if request.text is not None:
        read_text(request.text)
    if level in ("layers", "model"):
        from ktconv.verify import layers

        layers.refuse_impossible(subject)
    if level == "model":
        from ktconv.verify import model

        model.refuse_impossible(subject, request)


def _level(request: Request) -> str:
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
    request: Request,
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
        totals = _read_everything(ready, observer)
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
        COVERAGE: None if ready.coverage is None else dict(ready.coverage),
    }
    if reached >= 1:
        levels["weights"] = totals.as_dict(ready.subject)
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
    if name == "layers":
        from ktconv.verify.layers import check_layers

        return check_layers(ready.subject, ready.request, ready.findings, progression, say)
    from ktconv.verify.model import check_model

    return check_model(ready.subject, ready.request, ready.findings, say)


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
        "method": subject.options.method,
        "numa": subject.options.numa,
        "sample": request.sample,
        "seed": request.seed,
        "seconds": round(seconds, 3),
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


# ---- reading ----


def _read_everything(ready: Prepared, observer: Observer | None) -> Totals:
    """All items through worker threads, each with buffers of its own. The first error ends it."""
    totals, sizes = Totals(), buffer_sizes(ready.subject)
    threads = ready.request.threads or machine.usable_cpus()
    progress = _Progress(ready, observer)
    work = _Worker(lambda: Buffers(sizes), progress.advance)
    with ThreadPoolExecutor(threads) as pool:
        running = []
        try:
            for item in ready.items:
                progress.start(item)
                running.append(pool.submit(work, item))
                if len(running) >= 2 * threads:
                    progress.finish(running.pop(0).result(), totals)
            for future in running:
                progress.finish(future.result(), totals)
        except BaseException:
            work.stopped = True
            pool.shutdown(cancel_futures=True)
            raise
    return totals


class _Worker:
    """Runs items in pool threads; buffers stay with their thread."""

    def __init__(self, make: Callable[[], Buffers], advance: Callable[[int], None]) -> None:
        self._make, self._advance = make, advance
        self._local = threading.local()
        self.stopped = False

    def __call__(self, item: Item) -> Done:
        if self.stopped:
            return Done(0)
        if not hasattr(self._local, "buffers"):
            self._local.buffers = self._make()
        return item.run(self._local.buffers, self._advance)


class _Progress:
    """Tells an observer about units, whose items come one after the other."""

    def __init__(self, ready: Prepared, observer: Observer | None) -> None:
        self._observer, self._lock = observer, threading.Lock()
        self._left = Counter(item.unit for item in ready.items)
        self._started: set[str] = set()
        self._order = deque(item.unit for item in ready.items)
        if observer:
            observer.begin(list(self._left))

    def advance(self, nbytes: int) -> None:
        if self._observer:
            with self._lock:
                self._observer.advanced(nbytes)

    def start(self, item: Item) -> None:
        if self._observer and item.unit not in self._started:
            self._started.add(item.unit)
            with self._lock:
                self._observer.unit_started(item.unit)

    def finish(self, done: Done, totals: Totals) -> None:
        """The oldest item that was not finished yet is."""
        totals.add(done)
        unit = self._order.popleft()
        self._left[unit] -= 1
        if self._observer and not self._left[unit]:
            with self._lock:
                self._observer.unit_finished(unit)
