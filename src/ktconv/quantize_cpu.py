"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

    report = quantize_cpu(Request(model="path/to/model", output=Path("out")))

The steps are: plan from headers; check output, memory and disk; convert unit by unit;
write index and manifest when every unit is there. Everything that was finished stays
finished, whatever happens.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconv import __version__, machine
from ktconv.card import model_card
from ktconv.checkpoint import PROJECTIONS, Checkpoint, open_checkpoint, source_identity
from ktconv.errors import OutputError, ResourceError, UsageError
from ktconv.pipeline import Job, Observer, Pipeline
from ktconv.plan import Options, Plan, Unit, kt_files, make_plan
from ktconv.tasks import Buffers, BufferSizes, CopyTask, QuantizeTask, SourceReader
from ktconv.units import format_ranges, format_size
from ktconv.writer.files import io_error
from ktconv.writer.finish import (
    CARD,
    INDEX,
    MANIFEST,
    copy_sidecars,
    read_manifest,
    write_card,
    write_index,
    write_manifest,
)
from ktconv.writer.journal import (
    FINISH_BYTE,
    OTHERS_BYTE,
    Journal,
    OutputLock,
    Record,
    differences,
)
from ktconv.writer.staging import FolderStaging, ShardStaging, Staging

DISK_MARGIN = 64 << 20  # for index, manifest and what file systems need themselves
MEMORY_MARGIN = 96 << 20  # interpreter objects that grow while running


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert and how. `options.numa` of 0 means one part per NUMA node."""

    model: str
    output: Path
    options: Options = field(default_factory=Options)
    layers: Sequence[int] | None = None  # None: all
    threads: int | None = None  # None: one per CPU that this process may use
    max_memory: int = 8 << 30
    verify: bool = True
    overwrite: bool = False
    finalize: bool = False  # only write index and manifest of finished layers


@dataclass(frozen=True, slots=True)
class Outlook:
    """A planned conversion with what it will need here; what `--dry-run` prints."""

    request: Request
    plan: Plan
    units: Sequence[Unit]  # the layers this run is for
    threads: int
    peak_memory: int
    disk_free: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did."""

    outlook: Outlook
    converted: Sequence[str]  # keys of units written now
    kept: Sequence[str]  # keys of units that were there
    missing: Sequence[str]  # keys of units that other runs must still do
    complete: bool
    seconds: float
    source_bytes: int  # read by this run
    worst: tuple[str, float] | None = None  # tensor and relative RMS error
    mean_error: float | None = None


class SilentObserver:
    """Tells nobody."""

    def begin(self, keys: list[str]) -> None:
        pass

    def advanced(self, source_bytes: int) -> None:
        pass

    def unit_started(self, key: str) -> None:
        pass

    def unit_finished(self, key: str) -> None:
        pass


def prepare(request: Request) -> Outlook:
    """Open the checkpoint and plan. Reads headers only and writes nothing."""
    options = request.options
    if options.numa == 0:
        options = Options(**{**options.as_dict(), "numa": machine.numa_nodes()})  # type: ignore[arg-type]
    checkpoint = open_checkpoint(request.model)
    _refuse_nested(checkpoint.path, request.output)
    plan = make_plan(checkpoint, options)
    units = plan.layer_units(request.layers)
    threads, peak = _fit_memory(request, plan)
    return Outlook(request, plan, units, threads, peak, machine.disk_free(request.output))


def quantize_cpu(
    request: Request, observer: Observer | None = None, outlook: Outlook | None = None
) -> Report:
    """Convert; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    outlook = outlook or prepare(request)
    conversion = Conversion(outlook, observer or SilentObserver())
    return conversion.run()


def _refuse_nested(model: Path, output: Path) -> None:
    inside, resolved = output.resolve(), model.resolve()
    if inside == resolved or resolved in inside.parents:
        raise UsageError(
            f"the output {output} lies inside the model directory {model}",
            "choose a directory outside of it: loaders read every shard they find",
        )


def _fit_memory(request: Request, plan: Plan) -> tuple[int, int]:
    """Threads that the memory allows, and the peak to expect."""
    layers = [unit.layer for unit in plan.layers if unit.layer]
    per_thread = BufferSizes.of(layers, plan.format).nbytes
    base = machine.resident_memory() + MEMORY_MARGIN
    wanted = request.threads or machine.usable_cpus()
    affordable = (request.max_memory - base) // per_thread
    if affordable < 1 or (request.threads and affordable < request.threads):
        threads = request.threads or 1
        needed = base + threads * per_thread
        raise ResourceError(
            f"--max-memory {format_size(request.max_memory)} is too small: this conversion needs "
            f"{format_size(needed)} with {threads} thread(s)",
            f"use --max-memory {-(-needed // (1 << 20))}MiB or fewer --threads",
        )
    threads = min(wanted, affordable)
    return threads, base + threads * per_thread


class Conversion:
    """One run of a planned conversion into one output directory."""

    def __init__(self, outlook: Outlook, observer: Observer) -> None:
        self.outlook, self.plan, self.request = outlook, outlook.plan, outlook.request
        self.output = self.request.output
        self.observer = observer
        self.journal = Journal(self.output)
        self.lock = OutputLock(self.journal)
        self.done: dict[str, Record] = {}

    def run(self) -> Report:
        started = time.monotonic()
        self._refuse_foreign_files()
        self.journal.create()
        try:
            units = self._claim()
            if not self._resume():
                return self._report([], [], started)
            pending = [unit for unit in units if unit.key not in self.done]
            if not self.request.finalize:
                self._check_disk(pending)
                self._convert(pending)
            self._finish()
            return self._report(units, pending, started)
        finally:
            self.lock.release()

    # ---- before converting ----

    def _refuse_foreign_files(self) -> None:
        """Only what this plan writes may be in OUTPUT: loaders read every shard they find."""
        if not self.output.is_dir():
            return
        known = {shard.name for unit in self.plan.units for shard in unit.shards}
        known |= {unit.folder for unit in self.plan.units if unit.folder}
        known |= {path.parts[0] for path in self.plan.sidecars} | {MANIFEST, INDEX, CARD}
        ours = (self.journal.directory / "run.json").exists() or read_manifest(self.output)
        try:
            names = sorted(entry.name for entry in self.output.iterdir())
        except OSError as error:
            raise io_error("read", self.output, error) from error
        if self.request.overwrite and ours:
            known |= set(_files_of_earlier_run(self.output, self.journal))
        for name in names:
            if name.startswith("."):
                continue
            if not ours or name not in known:
                raise OutputError(
                    f"{self.output} holds {name}, which this conversion did not write",
                    "choose an empty directory, or the same options to continue a conversion "
                    "(--overwrite starts it again)",
                )

    def _claim(self) -> list[Unit]:
        """Lock what this run is for; other machines may work on the other layers."""
        units = list(self.outlook.units)
        indices = [unit.layer.index for unit in units if unit.layer]
        if self.request.overwrite:
            self.lock.acquire(
                [*(unit.layer.index for unit in self.plan.layers if unit.layer), OTHERS_BYTE],
                "this model",
            )
            self._remove_earlier_run()
            return [*units, *self.plan.others]
        self.lock.acquire(indices, f"layers {format_ranges(indices)}")
        if self.lock.try_acquire(OTHERS_BYTE):
            units += self.plan.others
        return units

    def _remove_earlier_run(self) -> None:
        for name in _files_of_earlier_run(self.output, self.journal):
            path = self.output / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in self.journal.directory.glob("*.json"):
            path.unlink(missing_ok=True)

    def _resume(self) -> bool:
        """Find what is done. False if the whole conversion is, and there is nothing to do."""
        ours = run_record(self.plan)
        earlier = self.journal.read_run()
        manifest = read_manifest(self.output) if earlier is None else None
        for there in (earlier, manifest):
            if there is not None:
                _refuse_difference(ours, there, self.output)
        if manifest is not None:
            self._adopt(manifest)
            if len(self.done) == len(self.plan.units) and self._sidecars_present():
                shutil.rmtree(self.journal.directory, ignore_errors=True)
                return False
        self.journal.write_run(ours)
        for unit in self.plan.units:
            record = self.journal.read_unit(unit.key)
            if record is not None and self.journal.unit_is_intact(record):
                self.done[unit.key] = record
        self._remove_stale_staging()
        return True

    def _adopt(self, manifest: Record) -> None:
        """A complete output, of which files may be lost: journal what is intact."""
        for key, record in manifest["units"].items():
            if self.journal.unit_is_intact(record):
                self.journal.write_unit(key, record)
                self.done[key] = record

    def _sidecars_present(self) -> bool:
        names = [*map(str, self.plan.sidecars), CARD]
        if self.plan.options.layout == "safetensors":
            names.append(INDEX)
        return all((self.output / name).is_file() for name in names)

    def _remove_stale_staging(self) -> None:
        """Staged files of units that this run will stage again, left by a killed run."""
        for unit in [*self.outlook.units, *self.plan.others]:
            for shard in unit.shards:
                (self.journal.directory / f"{shard.name}.part").unlink(missing_ok=True)

    def _check_disk(self, pending: Sequence[Unit]) -> None:
        needed = sum(unit.output_bytes for unit in pending) + DISK_MARGIN if pending else 0
        free = machine.disk_free(self.output)
        if needed > free:
            raise ResourceError(
                f"{self.output} has {format_size(free)} free, but {format_size(needed)} are needed",
                "free some space, choose another disk, or convert a part with --layers",
            )

    # ---- converting ----

    def _convert(self, pending: Sequence[Unit]) -> None:
        layers = [unit.layer for unit in self.plan.layers if unit.layer]
        sizes = BufferSizes.of(layers, self.plan.format)
        pipeline = Pipeline(self.outlook.threads, lambda: Buffers(sizes), self.observer)
        pipeline.run([self._job(unit) for unit in pending])

    def _job(self, unit: Unit) -> Job[Buffers]:
        checkpoint = self.plan.checkpoint
        reader = SourceReader(checkpoint.files, checkpoint.sources)

        def finish(files: list[dict[str, object]], tensors: dict[str, Any]) -> None:
            record = {"files": files, "tensors": tensors}
            self.journal.write_unit(unit.key, record)
            self.done[unit.key] = record

        return Job(
            unit.key,
            unit.source_bytes,
            open=lambda: self._stage(unit),
            tasks=lambda: list(self._tasks(unit, reader)),
            finish=finish,
        )

    def _stage(self, unit: Unit) -> Staging:
        staging = self.journal.directory
        if unit.folder is not None and unit.layer is not None:
            files = kt_files(unit.layer, self.plan.options)
            return FolderStaging(unit.folder, files, staging, self.output)
        return ShardStaging(unit.shards, staging, self.output)

    def _tasks(self, unit: Unit, reader: SourceReader) -> Iterator[QuantizeTask | CopyTask]:
        for tensor, name in unit.copies:
            yield CopyTask(reader, tensor, name)
        if unit.layer is None:
            return
        for expert in range(len(unit.layer.experts)):
            for proj in PROJECTIONS:
                yield QuantizeTask(
                    reader, unit.layer, expert, proj, self.plan.options, self.request.verify
                )

    # ---- after converting ----

    def _missing(self) -> list[str]:
        """Units that no run has finished; asks the journal, others may have worked too."""
        missing = []
        for unit in self.plan.units:
            if unit.key not in self.done:
                record = self.journal.read_unit(unit.key)
                if record is None or not self.journal.unit_is_intact(record):
                    missing.append(unit.key)
                else:
                    self.done[unit.key] = record
        return missing

    def _finish(self) -> None:
        if self.journal.read_run() is None:
            return  # a run that shares the work has finished it meanwhile
        missing = self._missing()
        if missing and self.request.finalize:
            raise OutputError(
                f"{self.output} cannot be finalized: {describe_units(missing)} not converted yet",
                "run the same command without --finalize",
            )
        if missing or not self.lock.try_acquire(FINISH_BYTE) or self.journal.read_run() is None:
            return
        self._write_final_files()

    def _write_final_files(self) -> None:
        staging, plan = self.journal.directory, self.plan
        copy_sidecars(plan.sidecars, plan.checkpoint.path, self.output, staging)
        write_card(model_card(plan), self.output, staging)
        units = ((unit.key, self.done[unit.key]) for unit in plan.units)
        write_manifest(run_record(plan), units, self.output, staging)
        if plan.options.layout == "safetensors":
            weight_map = {
                tensor: shard.name
                for unit in plan.units
                for shard in unit.shards
                for tensor in shard.offsets
            }
            write_index(weight_map, plan.total_size, self.output, staging)
        (staging / "run.json").unlink()  # from here on the manifest tells the state
        shutil.rmtree(staging, ignore_errors=True)

    def _report(self, units: Sequence[Unit], pending: Sequence[Unit], started: float) -> Report:
        errors = _relative_errors(self.done)
        complete = self.journal.read_run() is None and (self.output / MANIFEST).exists()
        missing = [unit.key for unit in self.plan.units if unit.key not in self.done]
        return Report(
            outlook=self.outlook,
            converted=[unit.key for unit in pending if unit.key in self.done],
            kept=[key for key in self.done if key not in {unit.key for unit in pending}],
            missing=[] if complete else missing,
            complete=complete,
            seconds=time.monotonic() - started,
            source_bytes=sum(unit.source_bytes for unit in pending),
            worst=max(errors, key=lambda item: item[1], default=None),
            mean_error=sum(value for _, value in errors) / len(errors) if errors else None,
        )


def run_record(plan: Plan) -> Record:
    """What a conversion is: two runs with the same record write the same bytes."""
    return {
        "schema": 1,
        "ktconv_version": __version__,
        "options": plan.options.as_dict(),
        "source": {"files": {file["name"]: file for file in source_identity(plan.checkpoint)}},
        "geometry": geometry(plan.checkpoint, plan),
    }


def geometry(checkpoint: Checkpoint, plan: Plan) -> Record:
    """Family and dimensions of the converted layers."""
    return {
        "model_type": checkpoint.config.get("model_type"),
        "layers": {
            str(unit.layer.index): {
                "experts": len(unit.layer.experts),
                "hidden_size": unit.layer.hidden_size,
                "intermediate_size": unit.layer.intermediate_size,
                "encoding": unit.layer.encoding,
                "mtp": unit.layer.is_mtp,
                "source": unit.layer.source,
            }
            for unit in plan.layers
            if unit.layer
        },
    }


def describe_units(keys: Sequence[str]) -> str:
    """ "layers 3-5 and non-expert tensors" """
    layers = [int(key.split("-")[1]) for key in keys if key.startswith("layer-")]
    words = [f"layer(s) {format_ranges(layers)}"] if layers else []
    if len(layers) < len(keys):
        words.append("non-expert tensors")
    return " and ".join(words)


def _refuse_difference(ours: Record, there: Record, output: Path) -> None:
    found = differences(ours, {key: there.get(key) for key in ours})
    if found:
        shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if found[3:] else "")
        raise OutputError(
            f"{output} was begun with other settings or another source: {shown}",
            "use the same settings and source to continue, or --overwrite to start again",
        )


def _files_of_earlier_run(output: Path, journal: Journal) -> list[str]:
    """Top-level names that an earlier run of ktconv wrote, whatever its settings were."""
    manifest = read_manifest(output)
    records = list(manifest["units"].values()) if manifest else []
    if journal.directory.is_dir():
        records += [
            record
            for path in journal.directory.glob("*-*.json")
            if (record := journal.read_unit(path.stem)) is not None
        ]
    names = {str(file["name"]).split("/")[0] for record in records for file in record["files"]}
    return [*sorted(names), MANIFEST, INDEX, CARD] if records or manifest else []


def _relative_errors(done: dict[str, Record]) -> list[tuple[str, float]]:
    return [
        (name, about["relative_rms_error"])
        for record in done.values()
        for name, about in record["tensors"].items()
        if "relative_rms_error" in about
    ]


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
