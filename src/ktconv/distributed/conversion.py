"""The driver's end of a conversion: plan, locks, journal and final names are here, nodes write."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import Unit
from ktconv.conversion.run import Conversion
from ktconv.distributed.cluster import Cluster, raise_of_node
from ktconv.distributed.driver import Listener, raise_failures, run_jobs
from ktconv.distributed.jobs import Failure, Job
from ktconv.distributed.requests import digest, job_memory, on_a_node, request_record
from ktconv.distributed.units import not_shared
from ktconv.errors import KtconvError
from ktconv.system.files import (
    make_directory,
    remove,
    sync,
    translated,
    write_behind,
    write_durably,
)
from ktconv.writer.journal import Record, file_is_intact
from ktconv.writer.staging import publish_folder, publish_shards, shard_record, staged_name


class Distribution(Struct, frozen=True):
    """The cluster on which units are converted."""

    cluster: Cluster
    scratch: Path | None = None  # on each node, for outputs that are not shared
    kind: str = "convert"

    def fitted(self, request: Any) -> Any:
        """The request with the threads of one node's job."""
        return replace(request, threads=request.threads or self.cluster.default_cpus())


class OnCluster(Conversion):
    """A conversion whose units are jobs. Classes of commands inherit from this one and theirs."""

    command: str  # of `commands.COMMANDS`
    distribution: Distribution

    def run_pipeline(self, units: Sequence[Unit]) -> None:
        with self._probe() as probe:
            arguments = self._arguments(probe)
            cluster, threads = self.distribution.cluster, self.preflight.threads
            jobs = [
                Job(
                    unit.key, self.distribution.kind, {**arguments, "unit": unit.key},
                    cpus=threads, memory=job_memory(self.preflight.peak_memory),
                )
                for unit in units
            ]  # fmt: skip
            if not jobs:
                return
            self._look(jobs[0], arguments)
            listener = _Units(self, {unit.key: unit for unit in units})
            raise_failures(run_jobs(jobs, cluster, listener), len(jobs))

    def _arguments(self, probe: Record) -> Record:
        options: Any = self.request.options
        request = replace(self.request, options=replace(options, **self.settled()))
        scratch = self.distribution.scratch
        there = self.output if scratch is None else scratch / "ktconv-output"  # not there
        request = on_a_node(request, there, self.preflight.threads)
        return {
            "command": self.command,
            "request": request_record(request),
            "digest": digest(self),
            "output": str(self.output.absolute()),
            "scratch": None if scratch is None else str(scratch.absolute()),
            **probe,
        }

    def settled(self) -> dict[str, Any]:
        """Options that follow from the driver's machine where the request leaves them open."""
        return {}

    @contextmanager
    def _probe(self) -> Iterator[Record]:
        """A file in OUTPUT that nodes look for."""
        token = uuid.uuid4().hex
        probe = self.journal.directory / f"probe-{token}.part"
        for stale in self.journal.directory.glob("probe-*.part"):
            remove(stale)
        write_durably(probe, token.encode(), self.journal.directory)
        try:
            yield {"probe": probe.name, "token": token}
        finally:
            with contextlib.suppress(KtconvError):
                remove(probe)

    def _look(self, job: Job, arguments: Record) -> None:
        """Ask every node that can work, before anything is converted."""
        cluster, token = self.distribution.cluster, arguments["token"]
        nodes = {node.id: node for node in cluster.working(job)}
        answers = {node: f"probe-{token}-{number}.part" for number, node in enumerate(nodes)}
        looks = [
            Job(node, "look", {**arguments, "answer": answers[node]}, cpus=0, node=node)
            for node in nodes
        ]
        failures = run_jobs(looks, cluster, Listener())
        try:
            alive = {node.id for node in cluster.working(job)}  # one can have died meanwhile
            for failure in sorted(failures, key=lambda one: nodes[one.key].name):
                if failure.key in alive:
                    raise_of_node(failure, nodes[failure.key])
            for node in nodes.keys() & alive if self.distribution.scratch is None else ():
                answer = self.journal.directory / answers[node]
                if not answer.is_file() or answer.read_text() != token:
                    raise not_shared(self.output, nodes[node].name)
        finally:
            for name in answers.values():
                with contextlib.suppress(KtconvError):
                    remove(self.journal.directory / name)


class _Units(Listener):
    """Makes the files of finished units final."""

    def __init__(self, conversion: OnCluster, units: dict[str, Unit]) -> None:
        self._conversion, self._units = conversion, units
        self._observer: Observer = conversion.observer
        self._staging, self._output = conversion.journal.directory, conversion.output
        self._received: dict[str, _Received] = {}
        self._started: set[str] = set()

    def started(self, job: Job, attempt: str, node: str) -> None:
        if job.key not in self._started:
            self._started.add(job.key)
            self._observer.unit_started(job.key)

    def advanced(self, job: Job, nbytes: int) -> None:
        self._observer.advanced(nbytes)

    def noted(self, text: str) -> None:
        self._observer.noted(text)

    def piece(self, job: Job, attempt: str, file: str, offset: int, data: bytes) -> None:
        if attempt not in self._received:
            unit = self._units[job.key]
            names = [staged for staged, _ in _staged_files(unit, attempt)]
            self._received[attempt] = _Received(self._staging, names)
        self._received[attempt].write(file, offset, data)

    def done(self, job: Job, attempt: str, result: Record) -> Failure | None:
        unit = self._units[job.key]
        received = self._received.pop(attempt, None)
        if received is not None and received.close() != result["files"]:
            return Failure(job.key, "its files changed on the way to the driver", mendable=True)
        for staged, record in _staged_files(unit, attempt):
            if not file_is_intact(self._staging, {**record, "name": staged}):
                return Failure(
                    job.key, f"what it wrote is not in {self._staging}: {staged}", mendable=True
                )
        if unit.folder is not None:
            publish_folder(unit.folder, self._staging, self._output, attempt)
        else:
            publish_shards(unit.shards, self._staging, self._output, attempt)
        files = [record for _, record in _staged_files(unit, attempt)]
        record = {"files": files, "tensors": result["tensors"]} | result["facts"]
        self._conversion.record(unit, record)
        self._observer.unit_finished(job.key)
        return None

    def abandoned(self, job: Job, attempt: str) -> None:
        if received := self._received.pop(attempt, None):
            received.close()
        unit = self._units[job.key]
        for name in [*unit.shard_names, *([unit.folder] if unit.folder else [])]:
            with contextlib.suppress(KtconvError):
                remove(self._staging / staged_name(name, attempt))


def _staged_files(unit: Unit, attempt: str) -> list[tuple[str, dict[str, object]]]:
    """The files of a unit: their names while they are staged, and the journal's records."""
    if unit.folder is None:
        return [(staged_name(one.name, attempt), shard_record(one)) for one in unit.shards]
    staged = staged_name(unit.folder, attempt)
    return [
        (f"{staged}/{path.split('/', 1)[1]}", {"name": path, "bytes": size})
        for path, size in unit.folder_files.values()
    ]


class _Received:
    """Files that come in pieces, in order."""

    def __init__(self, staging: Path, names: Sequence[str]) -> None:
        self._staging, self._names = staging, frozenset(names)
        self._sums: dict[str, Any] = {}
        self._fds: dict[str, int] = {}

    def write(self, name: str, offset: int, data: bytes) -> None:
        path = self._staging / name
        if name not in self._names:
            raise KtconvError(f"a node sent {name}, which its unit does not have")
        with translated("write", path):
            if name not in self._fds:
                make_directory(path.parent)
                self._fds[name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                self._sums[name] = hashlib.sha256()
            write_behind(self._fds[name], memoryview(data), offset)
        self._sums[name].update(data)

    def close(self) -> dict[str, str]:
        """Make everything durable; checksums by name."""
        for name, fd in self._fds.items():
            with translated("write", self._staging / name):
                os.fsync(fd)
                os.close(fd)
        with translated("write", self._staging):
            for directory in sorted({(self._staging / name).parent for name in self._fds}):
                sync(directory)
        self._fds = {}
        return {name: one.hexdigest() for name, one in self._sums.items()}
