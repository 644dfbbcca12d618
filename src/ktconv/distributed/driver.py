"""Runs jobs through a scheduler: tries again what another node can mend, collects failures."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ktconv.distributed.jobs import Failure, Job, Message
from ktconv.errors import KtconvError
from ktconv.system.text import first_few
from ktconv.system.units import counted
from ktconv.writer.journal import Record

ATTEMPTS = 4  # of a job, if nodes die under it
POLL_SECONDS = 1.0
QUEUED = 64  # jobs that the scheduler knows of, at least


class Scheduler(ABC):
    """Runs jobs somewhere."""

    @abstractmethod
    def submit(self, job: Job, avoid: frozenset[str]) -> Hashable:
        """Queue a job, elsewhere than on the nodes `avoid` if there is a choice."""

    @abstractmethod
    def wait(
        self, handles: Sequence[Hashable], seconds: float
    ) -> Iterable[tuple[Hashable, Message]]:
        """The next messages of these, in order; what was lost with its process or node is
        "failed". Empty after `seconds` without any."""

    @abstractmethod
    def cancel(self, handles: Sequence[Hashable]) -> None:
        """End these; they send nothing more."""

    @abstractmethod
    def capacity(self, job: Job) -> int:
        """Number of jobs like this one that fit into all nodes at once."""


class Listener:
    """Receives what happens; this base does nothing. Its errors end the whole run, except that
    `done` can return why a result cannot be used."""

    def started(self, job: Job, attempt: str, node: str) -> None: ...

    def advanced(self, job: Job, nbytes: int) -> None:
        """Add bytes to those before; repeated ones do not count."""

    def piece(self, job: Job, attempt: str, file: str, offset: int, data: bytes) -> None: ...

    def done(self, job: Job, attempt: str, result: Record) -> Failure | None: ...

    def abandoned(self, job: Job, attempt: str) -> None:
        """An attempt ended without a result."""

    def noted(self, text: str) -> None: ...


class _Progress(Struct, eq=False):
    """State of one job, as the driver knows it."""

    job: Job
    attempts: int = 0
    attempt: str = ""
    node: str = ""
    node_id: str = ""
    nbytes: int = 0  # of this attempt
    reported: int = 0  # the most of all attempts
    avoid: set[str] = field(default_factory=set)


def run_jobs(
    jobs: Sequence[Job], scheduler: Scheduler, listener: Listener, attempts: int = ATTEMPTS
) -> list[Failure]:
    """Run all; the failures of those that have no result. An error or interrupt cancels the rest.

    The arguments of each attempt have its name as "attempt", which no other attempt has.
    """
    return _Run(jobs, scheduler, listener, attempts).run()


class _Run:
    def __init__(
        self, jobs: Sequence[Job], scheduler: Scheduler, listener: Listener, attempts: int
    ) -> None:
        self._waiting = deque(_Progress(job) for job in jobs)
        self._running: dict[Hashable, _Progress] = {}
        self._scheduler, self._listener, self._attempts = scheduler, listener, attempts
        self._name, self._number = uuid.uuid4().hex[:8], 0
        self._failures: list[Failure] = []
        self._told = False

    def run(self) -> list[Failure]:
        try:
            while self._waiting or self._running:
                self._submit()
                heard = False
                for handle, message in self._scheduler.wait(list(self._running), POLL_SECONDS):
                    heard = True
                    if handle in self._running:
                        self._receive(handle, message)
                if not heard:
                    self._explain_silence()
        except BaseException:
            self._scheduler.cancel(list(self._running))
            for one in self._running.values():
                self._listener.abandoned(one.job, one.attempt)
            raise
        return self._failures

    def _submit(self) -> None:
        while self._waiting:
            fits = self._scheduler.capacity(self._waiting[0].job)
            if len(self._running) >= max(QUEUED, 2 * fits):
                return
            one = self._waiting.popleft()
            self._number += 1
            one.attempts += 1
            one.attempt, one.nbytes = f"{self._name}-{self._number}", 0
            one.node = one.node_id = ""
            arguments = {**one.job.arguments, "attempt": one.attempt}
            job = replace(one.job, arguments=arguments)
            self._running[self._scheduler.submit(job, frozenset(one.avoid))] = one

    def _explain_silence(self) -> None:
        one = next(iter(self._running.values()), None)
        if one and not self._told and not self._scheduler.capacity(one.job):
            self._told = True
            self._listener.noted(
                f"no node of the cluster has room for {one.job.cpus} CPUs now: waiting for one"
            )

    def _receive(self, handle: Hashable, message: Message) -> None:
        one, event = self._running[handle], message["event"]
        if event == "started":
            one.node, one.node_id = str(message["node"]), str(message.get("node_id", ""))
            self._listener.started(one.job, one.attempt, one.node)
        elif event == "advanced":
            one.nbytes += int(message["nbytes"])
            if one.nbytes > one.reported:
                self._listener.advanced(one.job, one.nbytes - one.reported)
                one.reported = one.nbytes
        elif event == "piece":
            fields: tuple[Any, Any, Any] = message["file"], message["offset"], message["data"]
            self._listener.piece(one.job, one.attempt, *fields)
        elif event == "noted":
            self._listener.noted(f"{one.job.key} on {one.node}: {message['text']}")
        elif event == "done":
            if failure := self._listener.done(one.job, one.attempt, message["result"]):
                self._fail(handle, one, failure)
            else:
                del self._running[handle]
        else:
            fields_of = {name: message[name] for name in ("message", "hint", "exit_code")}
            failure = Failure(
                one.job.key, node=one.node, mendable=bool(message["mendable"]), **fields_of
            )
            self._fail(handle, one, failure)

    def _fail(self, handle: Hashable, one: _Progress, failure: Failure) -> None:
        self._listener.abandoned(one.job, one.attempt)
        del self._running[handle]
        where = f" on {one.node}" if one.node else ""
        if failure.mendable and one.attempts < self._attempts and one.job.node is None:
            one.avoid |= {one.node_id} - {""}
            self._listener.noted(f"{one.job.key} failed{where}, runs again: {failure.message}")
            self._waiting.appendleft(one)
            return
        self._failures.append(failure)
        self._listener.noted(f"{one.job.key} failed{where}: {failure.message}")


KEPT = "run the same command again: finished units are kept"


class JobsFailedError(KtconvError):
    """Some jobs failed; the others are finished."""


def raise_failures(failures: Sequence[Failure], total: int, again: str = KEPT) -> None:
    """JobsFailedError that names what failed, and why the first one did. `again`: what running
    the same command again does."""
    if not failures:
        return
    first = min(failures, key=lambda failure: failure.key)
    where = f" on {first.node}" if first.node else ""
    others = sorted(failure.key for failure in failures if failure is not first)
    more = f"; also {first_few(others, 5)}" if others else ""
    error = JobsFailedError(
        f"{len(failures)} of {counted(total, 'unit')} failed: {first.key}{where}: "
        f"{first.message}{more}",
        (f"{first.hint.rstrip('.')}; " if first.hint else "") + again,
    )
    error.exit_code = max(failure.exit_code for failure in failures)
    raise error
