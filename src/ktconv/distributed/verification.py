"""`verify --ray`: levels structure and weights read on nodes, a layer at a time.

The driver checks headers and plans; nodes plan the same checks and run some of them. What fails and
the errors of matrices come back as plain values, and are added up in the order of one machine.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer
from ktconv.distributed.cluster import Cluster
from ktconv.distributed.driver import Listener, raise_failures, run_jobs
from ktconv.distributed.jobs import Failure, Job, Reporter, node_name
from ktconv.distributed.requests import decode, encode, job_memory, source_record
from ktconv.distributed.units import Watched
from ktconv.errors import CheckpointError
from ktconv.source import ModelSource
from ktconv.verify.request import Thresholds, VerifyRequest
from ktconv.verify.run import prepare
from ktconv.verify.runner import Check, run_checks
from ktconv.verify.totals import ItemResult
from ktconv.verify.verifier import OutputVerifier
from ktconv.writer.journal import Record

JOB_BYTES = 16 << 30  # of progress: more than a layer; other tensors are one unit, but many jobs
_AGAIN = "then verify again"


class OnNodes(Struct, frozen=True):
    """Reads on the nodes of a cluster; a `verify.run.Reading`."""

    cluster: Cluster

    def __call__(self, verifier: OutputVerifier, observer: Any) -> Iterator[ItemResult]:
        arguments = {
            "request": _record(verifier.request, verifier.level),
            "run": uuid.uuid4().hex,
            "digest": _digest(verifier.checks),
        }
        budget = verifier.budget
        jobs = [
            Job(
                f"{unit}-{first}", "verify",
                {**arguments, "first": first, "last": last},
                cpus=budget.threads, memory=job_memory(budget.peak),
            )
            for unit, first, last in _portions(verifier.checks)
        ]  # fmt: skip
        if not jobs:
            return
        self.cluster.working(jobs[0])
        listener = _Portions(jobs, observer or Observer())
        raise_failures(run_jobs(jobs, self.cluster, listener), len(jobs), _AGAIN)
        for job in jobs:
            found = listener.results[job.key]
            for one in found["failures"]:
                verifier.findings.add(*one)
            yield from (convert(one, ItemResult) for one in found["items"])


class _Portions(Listener):
    """Keeps results, and reports on units whose portions are jobs."""

    def __init__(self, jobs: Sequence[Job], observer: Observer) -> None:
        self.results: dict[str, Record] = {}
        self._observer = observer
        self._left: dict[str, set[str]] = {}
        for job in jobs:
            self._left.setdefault(_unit(job), set()).add(job.key)
        self._started: set[str] = set()
        observer.begin(list(self._left))

    def started(self, job: Job, attempt: str, node: str) -> None:
        unit = _unit(job)
        if unit not in self._started:
            self._started.add(unit)
            self._observer.unit_started(unit)

    def advanced(self, job: Job, nbytes: int) -> None:
        self._observer.advanced(nbytes)

    def noted(self, text: str) -> None:
        self._observer.noted(text)

    def done(self, job: Job, attempt: str, result: Record) -> Failure | None:
        self.results[job.key] = result
        left = self._left[_unit(job)]
        left.discard(job.key)
        if not left:
            self._observer.unit_finished(_unit(job))
        return None


def _unit(job: Job) -> str:
    return job.key.rpartition("-")[0]


def _portions(checks: Sequence[Check[ItemResult]]) -> Iterator[tuple[str, int, int]]:
    """Unit, first and behind the last check of each job."""
    for unit, numbered in groupby(enumerate(checks), key=lambda one: one[1].unit):
        first, nbytes, last = -1, 0, -1
        for number, check in numbered:
            if first >= 0 and nbytes + check.nbytes > JOB_BYTES:
                yield unit, first, number
                first, nbytes = -1, 0
            first = number if first < 0 else first
            nbytes, last = nbytes + check.nbytes, number
        yield unit, first, last + 1


def _digest(checks: Sequence[Check[ItemResult]]) -> str:
    """Checksum of what will be read."""
    text = json.dumps([(check.unit, check.nbytes) for check in checks])
    return hashlib.sha256(text.encode()).hexdigest()


def _record(request: VerifyRequest, level: str) -> Record:
    """The request as nodes run it: they only read."""
    there = replace(
        request,
        level="structure" if level == "structure" else "weights",
        source=None,
        thresholds=Thresholds(),
        gradients=False, text=None, work_dir=None, beside=None, tp=None, ep=None,
    )  # fmt: skip
    names = [name for name in there.__struct_fields__ if name != "thresholds"]
    source = request.original and source_record(request.original)
    return {name: encode(getattr(there, name)) for name in names} | {"source": source}


def _request(record: Record) -> VerifyRequest:
    """Read a request that `_record` wrote."""
    given = decode(record)
    source = given["source"] and ModelSource(**given["source"])
    return VerifyRequest(**{**given, "source": source})


# ---- a node's end ------------------------------------------------------------------------------

_verifiers: dict[str, OutputVerifier] = {}


def check(arguments: Record, reporter: Reporter) -> Record:
    """Run some checks: their results, and what failed."""
    verifier = _opened(arguments)
    verifier.findings.take()  # of an attempt that was cancelled
    checks = verifier.checks[arguments["first"] : arguments["last"]]
    found = run_checks(checks, verifier.buffer_sizes(), verifier.budget.threads, Watched(reporter))
    return {"items": to_builtins(list(found)), "failures": verifier.findings.take()}


def _opened(arguments: Record) -> OutputVerifier:
    """The verifier of this run, prepared once in this process."""
    key = arguments["run"]
    if key not in _verifiers:
        verifier = prepare(_request(arguments["request"]))
        if _digest(verifier.checks) != arguments["digest"]:
            raise CheckpointError(
                f"{verifier.request.output} or its source on {node_name()} is not what it is on "
                "the driver",
                "use a shared directory for both, or equal copies",
            )
        _verifiers.clear()
        _verifiers[key] = verifier
    return _verifiers[key]
