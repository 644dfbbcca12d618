"""A node's end of a conversion: one unit is converted into staged files, which the driver makes
final. Where OUTPUT is not shared they lie in a scratch directory and go to the driver in pieces."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import Unit
from ktconv.conversion.run import Conversion, staging_of
from ktconv.distributed.jobs import Reporter, node_name
from ktconv.distributed.requests import digest, request_of
from ktconv.errors import CheckpointError, KtconvError, OutputError, ResourceError
from ktconv.system import machine
from ktconv.system.files import make_directory, remove, translated
from ktconv.system.regular_files import opened_regular
from ktconv.system.units import format_size
from ktconv.writer.journal import STATE_DIRECTORY, Record
from ktconv.writer.staging import FolderStaging, ShardStaging

PIECE_BYTES = 8 << 20  # that go through the object store at once


class Sealing:
    """Staged files that become durable here and final elsewhere."""

    def __init__(self, staging: ShardStaging | FolderStaging) -> None:
        self._staging = staging
        self.write, self.read, self.abandon = staging.write, staging.read, staging.abandon
        self.files, self.mapped, self.place = staging.files, staging.mapped, staging.place

    def commit(self) -> list[dict[str, object]]:
        self._staging.seal()
        return []


class OneUnit(Conversion):
    """A conversion of which this process writes a unit at a time, as staged files."""

    directory: Path
    attempt: str
    result: Record
    staging: Sealing | None = None

    def stage(self, unit: Unit) -> Sealing:
        self.staging = Sealing(staging_of(unit, self.directory, self.output, self.attempt))
        return self.staging

    def finished(self, unit: Unit, files: list[dict[str, object]], tensors: dict[str, Any]) -> None:
        self.result = {"tensors": tensors, "facts": self.unit_facts(unit)}


class Watched(Observer):
    """Passes progress on."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def advanced(self, source_bytes: int) -> None:
        self._reporter.advanced(source_bytes)


# ---- kinds of jobs ---------------------------------------------------------------------


def convert(arguments: Record, reporter: Reporter) -> Record:
    """Convert one unit. Its record, and with a scratch directory the checksums of its files, which
    were sent before."""
    conversion = _opened(arguments)
    unit = next(unit for unit in conversion.plan.units if unit.key == arguments["unit"])
    scratch = arguments["scratch"]
    if scratch is None:
        _check_shared(arguments)
        _run(conversion, unit, Path(arguments["output"]) / STATE_DIRECTORY, arguments, reporter)
        return conversion.result
    place = _scratch(Path(scratch), arguments["attempt"])
    try:
        free = machine.disk_free(place)
        if free < unit.output_bytes:
            raise ResourceError(
                f"--ray-scratch {scratch} has {format_size(free)} free, but {unit.key} needs "
                f"{format_size(unit.output_bytes)}",
                "free some space there, or use another directory",
            )
        _run(conversion, unit, place, arguments, reporter)
        assert conversion.staging is not None
        sums = {str(file): _send(place, file, reporter) for file in conversion.staging.files()}
        return conversion.result | {"files": sums}
    finally:
        remove(place)


def _run(
    conversion: OneUnit, unit: Unit, directory: Path, arguments: Record, reporter: Reporter
) -> None:
    conversion.directory, conversion.attempt = directory, arguments["attempt"]
    conversion.observer = Watched(reporter)
    conversion.run_pipeline([unit])


def _send(place: Path, file: Path, reporter: Reporter) -> str:
    sha256, offset = hashlib.sha256(), 0
    with translated("read", place / file), (place / file).open("rb") as source:
        while data := source.read(PIECE_BYTES):
            sha256.update(data)
            reporter.piece(str(file), offset, data)
            offset += len(data)
    if offset == 0:
        reporter.piece(str(file), 0, b"")
    return sha256.hexdigest()


def look(arguments: Record, reporter: Reporter) -> Record:
    """Whether this node can take part: it reads the model as the driver does, and sees the probe
    file in OUTPUT, which it answers with one of its own; or has the scratch directory."""
    _opened(arguments)
    if arguments["scratch"] is not None:
        remove(_scratch(Path(arguments["scratch"]), arguments["attempt"]))
        return {}
    _check_shared(arguments)
    answer = Path(arguments["output"]) / STATE_DIRECTORY / arguments["answer"]
    with translated("write", answer):
        answer.write_text(arguments["token"])
        descriptor = os.open(answer, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {}


def _check_shared(arguments: Record) -> None:
    probe = Path(arguments["output"]) / STATE_DIRECTORY / arguments["probe"]
    try:
        with opened_regular(probe) as descriptor:
            found = os.read(descriptor, 1000).decode(errors="replace")
    except (KtconvError, OSError):
        found = ""
    if found != arguments["token"]:
        raise not_shared(arguments["output"], node_name())


def not_shared(output: str | Path, node: str) -> OutputError:
    return OutputError(
        f"{output} is not shared: {node} does not see what the driver writes there",
        "use a directory that all nodes mount at the same path, or give each node a local "
        "directory with --ray-scratch DIR, from which results go through Ray",
    )


# ---- what a process keeps --------------------------------------------------------------

_conversions: dict[str, OneUnit] = {}


def _opened(arguments: Record) -> OneUnit:
    """The conversion, planned once in this process. CheckpointError where it is another one here
    than on the driver."""
    key = arguments["digest"]
    if key not in _conversions:
        from ktconv.distributed.commands import COMMANDS

        command = COMMANDS[arguments["command"]]
        request = request_of(arguments["request"], command.request, command.options)
        conversion = command.unit(command.prepare(request), Observer())
        if digest(conversion) != key:
            raise CheckpointError(
                f"{request.model} or another input on {node_name()} is not what it is on the "
                "driver: names, sizes or modification times of files differ",
                "use a shared directory for both, or copies that keep modification times (cp -p)",
            )
        _conversions.clear()  # of another model
        _conversions[key] = conversion
    return _conversions[key]


def _scratch(scratch: Path, attempt: str) -> Path:
    """A new directory of this attempt; those that ended processes of this node left are removed."""
    prefix = f"ktconv-{node_name()}-"
    make_directory(scratch)
    for path in scratch.glob(f"{prefix}*"):
        match = re.fullmatch(re.escape(prefix) + "([0-9]+)-.*", path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            remove(path)
    place = scratch / f"{prefix}{os.getpid()}-{attempt}"
    make_directory(place)
    return place
