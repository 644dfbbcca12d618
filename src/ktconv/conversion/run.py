"""One run of a planned conversion into one output directory: streaming and resumable.

The steps are: check output and disk; convert unit by unit; write index and manifest when
every unit is there. Everything that was finished stays finished, whatever happens.
Subclasses define the tasks that write experts, and the files next to the shards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

from msgspec import Struct, field

from ktconv import native
from ktconv.conversion.output import OutputState
from ktconv.conversion.pipeline import Observer, Pipeline, Task
from ktconv.conversion.plan import LayerUnit, Plan, T_co, Unit
from ktconv.conversion.records import (
    ZERO_SCALES,
    ErrorSummary,
    adapters_record,
    describe_units,
    name_in_model,
    run_record,
)
from ktconv.conversion.target import BaseOptions, Target
from ktconv.conversion.tasks import CopyTask
from ktconv.errors import (
    DiskSpaceError,
    KtconvError,
    MemoryLimitError,
    OutputError,
    UsageError,
)
from ktconv.source import Checkpoint, ModelSource, TensorRef
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import KeptReader, SourceReader
from ktconv.source.reading.scale_scan import Chosen, scales_bytes, scan_scales
from ktconv.source.remote.urls import url_of_path
from ktconv.source.side_files import RECORDS, flaws
from ktconv.source.source_card import source_card
from ktconv.system import machine
from ktconv.system.files import is_there, remove, remove_empty, sync, translated, write_durably
from ktconv.system.opened import store_of
from ktconv.system.stores import is_remote
from ktconv.system.text import first_few
from ktconv.system.units import counted, format_size, listed
from ktconv.writer.journal import (
    OTHERS_BYTE,
    Journal,
    OutputLock,
    Record,
    changed,
    is_run_record,
)
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from ktconv.writer.metadata import CARD, copy_sidecars, write_index, write_made_files
from ktconv.writer.option_files import is_output
from ktconv.writer.staging import FolderStaging, ShardStaging, Staging

DISK_MARGIN = 64 << 20  # for index, manifest and what file systems need themselves
SCAN_BYTES = 1 << 30  # of scales, which a dry run looks at too
MANIFEST_EXPANSION = 5  # memory of parsed JSON, per byte of text
WITHDRAW_SECONDS = 1.0  # a run that was interrupted ends soon
_SEARCH = "search"  # option that older versions, which had one search, did not record
MEMORY_MARGIN = 96 << 20  # interpreter objects that grow while running


class BaseRequest(Struct, frozen=True):
    """A request of a conversion: every conversion has these fields."""

    model: ModelSource | str  # a str: as it is read by default
    output: Path  # a directory, made if it is missing
    options: BaseOptions  # which bytes are written; a resumed run must have the same
    layers: Sequence[int] | None = None  # None: all
    threads: int | None = None  # None: one per CPU that this process may use
    max_memory: int = 8 << 30  # bytes
    verify: bool = True  # read back what was written
    overwrite: bool = False  # remove what ktconv wrote there, and start again
    finalize: bool = False  # only write index and manifest of finished layers

    @property
    def source(self) -> ModelSource:
        """The model with the options about reading it."""
        return ModelSource.of(self.model)


class Preflight(Struct, Generic[T_co], frozen=True):
    """A planned conversion with its needs of memory and disk; what `--dry-run` prints."""

    request: BaseRequest
    plan: Plan[T_co]
    units: Sequence[LayerUnit]  # the layers this run is for
    threads: int
    peak_memory: int
    disk_free: int

    def zero_scales(self) -> int | None:
        """Count the zero scales of the units that this run would write. None: they are looked
        at when the conversion begins, since reading them takes long.

        Raises CheckpointError for a scale that cannot be one.
        """
        units = self.pending()
        chosen = scaled_layers(self.plan, units)
        if chosen is None or scales_bytes(chosen) > SCAN_BYTES:
            return None
        checkpoint = self.plan.checkpoint
        reader = SourceReader(checkpoint.files, checkpoint.sources)
        return sum(scan_scales(chosen, reader, self.threads).values())

    def pending(self) -> list[Unit]:
        """Units that this run would write: those that are not there as planned."""
        if self.request.finalize:
            return []
        units = [*self.units, *self.plan.others]
        state = OutputState(self.plan, Journal(self.request.output))
        return units if self.request.overwrite else state.pending(units)

    def disk_needed(self, units: Sequence[Unit]) -> int:
        """Bytes that must be free to write these units, and what comes with them."""
        if not units:
            return 0
        written = sum(unit.output_bytes for unit in units)
        return written + DISK_MARGIN + self.passing_bytes(units)

    def passing_bytes(self, units: Sequence[Unit]) -> int:
        """Bytes of files that a run keeps next to its journal while it writes these units."""
        return 0


def scaled_layers(plan: Plan[Target], units: Sequence[Unit]) -> list[Chosen] | None:
    """The layers among units whose scales are looked at before anything is written; None for a
    remote source, where each small read is a request: there each layer's are looked at before
    the layer is final."""
    if is_remote(plan.checkpoint.path):
        return None
    return [(unit.layer, unit.experts) for unit in units if isinstance(unit, LayerUnit)]


class Report(Struct, frozen=True):
    """Result of a run, and the errors of what it wrote."""

    preflight: Preflight[Target]  # the plan that it followed
    converted: Sequence[str]  # keys of units written now
    kept: Sequence[str]  # keys of units that were there
    missing: Sequence[str]  # keys of units that other runs must still do
    complete: bool  # every unit is there, with index and manifest
    seconds: float  # wall time
    source_bytes: int  # read by this run
    worst: tuple[str, float] | None = None  # tensor and relative RMS error
    mean_error: float | None = None  # relative RMS error over all matrices
    zero_scales: int = 0  # of the source, in all finished units
    lost: int = 0  # matrices that became nearly all zeros
    lost_names: Sequence[str] = ()  # of their tensors, some
    more: Record = field(default_factory=dict)  # facts of this kind of conversion alone


def check_request(request: BaseRequest) -> None:
    """UsageError for a request that cannot be run, whatever the model."""
    if request.overwrite and request.finalize:
        raise UsageError(
            "--overwrite and --finalize cannot be combined: the first removes what "
            "the second completes",
            "use one of them",
        )
    native.isa()  # reports an unusable KTCONV_ISA before an hour of work


def refuse_nested(source: Path, output: Path, what: str = "the model directory") -> None:
    """UsageError for an output inside the source, where loaders would take it for a part of it; or
    that is the directory of the source's file. Other names of the same directory, as of a bind
    mount, are recognised."""
    inside = Path(os.path.realpath(output))  # resolve() raises for links in a circle
    if source.is_file():
        with contextlib.suppress(OSError):  # not there yet
            if inside.samefile(source.parent):
                raise UsageError(
                    f"the output {output} is the directory of {source}",
                    "choose another directory: a conversion removes what an earlier one wrote",
                )
        return
    for directory in (inside, *inside.parents):
        with contextlib.suppress(OSError):  # not there yet
            if directory.samefile(source):
                raise UsageError(
                    f"the output {output} is inside {what} {source}",
                    "choose a directory outside of it, because loaders read every shard they find",
                )


def fit_threads(
    max_memory: int, wanted: int | None, base: int, per_thread: int, what: str = "conversion"
) -> int:
    """Number of workers that the memory allows; raises UsageError if fewer than requested."""
    affordable = (max_memory - base) // per_thread
    if affordable < 1 or (wanted and affordable < wanted):
        threads = wanted or 1
        needed = base + threads * per_thread
        raise MemoryLimitError(
            f"--max-memory {format_size(max_memory)} is too small: this {what} needs "
            f"at least {format_size(needed)} with {counted(threads, 'thread')}",
            f"use --max-memory {-(-needed // (1 << 20))}MiB or fewer --threads",
        )
    return min(wanted or machine.usable_cpus(), affordable)


def fit_memory(
    request: BaseRequest, checkpoint: Checkpoint, per_thread: int, libraries: int = 0
) -> tuple[int, int]:
    """Threads that --max-memory allows, and the peak to expect."""
    base = machine.resident_memory() + MEMORY_MARGIN + libraries + manifest_memory(request.output)
    base += store_of(checkpoint.path).memory + checkpoint.shared_memory
    per_thread += checkpoint.thread_memory
    threads = fit_threads(request.max_memory, request.threads, base, per_thread)
    return threads, base + threads * per_thread


def check_output(plan: Plan[Target], output: Path) -> None:
    """Refuse a URL, and an output directory with files that ktconv did not write, or inside another
    output: later runs there would find it in their way, and KTransformers reads every shard
    below."""
    if url := url_of_path(output):
        raise UsageError(
            f"the output {url} is a URL",
            "give a directory of this machine; ktconv push sends it to the hub afterwards",
        )
    for directory in Path(os.path.realpath(output)).parents:
        if is_output(directory):
            raise UsageError(
                f"the output {output} is inside {directory}, an output of ktconv",
                "choose a directory outside of it",
            )
    OutputState(plan, Journal(output)).refuse_foreign_files()


def manifest_memory(output: Path) -> int:
    """Memory for reading the manifest that an earlier run left, in bytes."""
    try:
        return MANIFEST_EXPANSION * (output / MANIFEST).stat().st_size
    except OSError:
        return 0


def staging_of(
    unit: Unit, staging: Path, output: Path, attempt: str = ""
) -> ShardStaging | FolderStaging:
    """Staging that writes the files of a unit into `staging`, and moves them to `output`."""
    if unit.folder is not None:
        return FolderStaging(unit.folder, unit.folder_files, staging, output, attempt)
    return ShardStaging(unit.shards, staging, output, attempt, unit.slots)


class Conversion(ABC):
    """One run of a planned conversion into one output directory."""

    @abstractmethod
    def buffers(self) -> BufferSizes:
        """Buffers that a worker needs."""

    @abstractmethod
    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        """Tasks that write the experts of a unit."""

    @abstractmethod
    def card(self) -> str:
        """README.md of the output."""

    def reader(self) -> SourceReader:
        """Reader of the source."""
        checkpoint = self.plan.checkpoint
        return SourceReader(checkpoint.files, checkpoint.sources)

    def copy_task(self, reader: SourceReader, tensor: TensorRef, name: str) -> Task:
        """Task that writes a tensor that is no expert's."""
        return CopyTask(reader, tensor, name, self.request.verify)

    def origin(self) -> Record:
        """Inputs besides the source, for run.json and manifest; a run into an output with another
        origin is refused."""
        return {}

    def about_made_files(self) -> Record:
        """Content of `made_files` that does not follow from the rest of the manifest."""
        return {}

    def more(self) -> Record:
        """Facts of the report besides those of all conversions; JSON-ready."""
        return {}

    def unit_facts(self, unit: Unit) -> Record:
        """Facts of a unit in the journal besides its files and tensors."""
        zeros = self._zero_scales.get(unit.key)
        return {ZERO_SCALES: zeros} if zeros else {}

    def made_files(self) -> Mapping[str, bytes]:
        """The plan's `made_files` by name."""
        return self.plan.checkpoint.made_files

    def __init__(self, preflight: Preflight[Target], observer: Observer) -> None:
        self.preflight, self.plan, self.request = preflight, preflight.plan, preflight.request
        self.output = self.request.output
        self.observer = observer
        self.journal = Journal(self.output)
        self.lock = OutputLock(self.journal)
        self.state = OutputState(self.plan, self.journal)
        self.done: set[str] = set()
        self.errors = ErrorSummary()
        self.source_card = source_card(self.plan.checkpoint, str(self.request.source.model))
        self._readers: dict[str, KeptReader] = {}  # of units under way
        self._zero_scales: dict[str, int] = {}  # of units of the source, where it was counted

    def run(self) -> Report:
        started = time.monotonic()
        self.state.refuse_foreign_files()
        existed, fresh = is_there(self.output), not is_there(self.journal.directory)
        try:
            return self._run(started)
        except BaseException:
            if fresh:
                self._withdraw(existed)
            raise
        finally:
            self.lock.release()
            if not self.journal.has_run():
                remove_empty(self.journal.directory)

    def _run(self, started: float) -> Report:
        if self._is_finished():
            return self._report([], started)
        with self.lock.setup_lock(self.observer.noted):
            units = self._claim()
            complete = self._resume(units)
        pending = [unit for unit in units if unit.key not in self.done]
        if not complete:
            if pending:
                self._check_disk(pending)
                self._check_scales(pending)
                self.convert(pending)
            with self.lock.setup_lock(self.observer.noted):
                self._finish()
                # Before the setup lock: who comes last must find all units unlocked.
                self.lock.release()
        return self._report(pending, started)

    # ---- before converting ----

    def _is_finished(self) -> bool:
        """Whether the whole conversion is there. Seen without a lock: the disk may be read-only."""
        if self.request.overwrite or is_there(self.journal.directory):
            return False
        manifest = read_manifest(self.output)
        if manifest is None:
            return False
        self._refuse_others(manifest.record)
        return self._adopted(self._intact(manifest), manifest)

    def _claim(self) -> list[Unit]:
        """Lock what this run is for; other machines may work on the other layers."""
        if self.request.overwrite:
            self.lock.acquire({*self._all_bytes(), *self._earlier_layers()}, "this model")
            self.state.remove_earlier_run()
        if self.request.finalize:
            return []
        indices = [unit.layer.index for unit in self.preflight.units]
        self.lock.acquire(indices, listed("layer", indices))
        others = self.plan.others if self.lock.try_acquire([OTHERS_BYTE]) else ()
        return [*self.preflight.units, *others]

    def _earlier_layers(self) -> list[int]:
        """Layers of the run that began this output, which may be others than ours."""
        there = self.journal.peek_run()
        return [int(index) for index in there["geometry"]["layers"]] if is_run_record(there) else []

    def _all_bytes(self) -> list[int]:
        return [*(layer.index for layer in self.plan.moe_layers), OTHERS_BYTE]

    def _resume(self, claimed: Sequence[Unit]) -> bool:
        """Find what is done. True if the whole conversion is, and there is nothing to do."""
        earlier = self.journal.read_run()
        manifest = read_manifest(self.output) if earlier is None else None
        for there in (earlier, manifest.record if manifest else None):
            if there is not None:
                self._refuse_others(there)
        intact = self._intact(manifest) if manifest is not None else {}
        if manifest is not None and self._adopted(intact, manifest):
            if self.lock.try_acquire(self._all_bytes()):
                shutil.rmtree(self.journal.directory, ignore_errors=True)
            return True
        if earlier is None:
            run = run_record(self.plan) | adapters_record(self.plan)
            run |= self.state.claim() | self.origin()
            self.journal.begin(run)
            for key, record in intact.items():
                self.journal.write_unit(key, record)
            self.journal.write_run(run)
        self._find_done()
        self.state.remove_stale_staging(claimed)
        return False

    def _refuse_others(self, there: Record) -> None:
        """OutputError unless the run that left this record is continued by this one."""
        ours = run_record(self.plan)
        now, before = ours["options"], there.get("options", {})
        if _SEARCH in now and _SEARCH not in before and now["scale"] == before.get("scale"):
            raise OutputError(
                f"{self.output} was begun by an earlier version of ktconv, whose search chooses "
                "other scales",
                "continue with that version, or start again with --overwrite",
            )
        if found := changed(ours, there):
            raise OutputError(
                f"{self.output} was begun with other settings or another source: "
                f"{first_few(found, between='; ')}",
                "use the same settings and source to continue (a copy of the source must have its "
                "modification times: cp -p), or --overwrite to start again",
            )
        if found := changed(self.origin(), there):
            raise OutputError(
                f"{self.output} was begun from other input files or tools: {found[0]}",
                "use the same ones to continue (copied files must keep their "
                "modification times: cp -p), or start again with --overwrite",
            )

    def _intact(self, manifest: Manifest) -> dict[str, Record]:
        """Records of the units of a finished conversion that are still as they were."""
        there = manifest.units
        return {
            unit.key: record
            for unit in self.plan.units
            if (record := self.state.intact_record(unit, there.get(unit.key)))
        }

    def _adopted(self, intact: dict[str, Record], manifest: Manifest) -> bool:
        """Whether these are all units and the final files exist; then all count as done."""
        if len(intact) < len(self.plan.units) or not self.state.final_files_present():
            return False
        self._note_changed_files(manifest)
        for key, record in intact.items():
            self._mark_done(key, record)
        return True

    def _note_changed_files(self, manifest: Manifest) -> None:
        """Names side files that are not as they were written. They may have been edited on purpose,
        so they stay."""
        for flaw in flaws(self.output, manifest.side_files or {}):
            if flaw.check in ("changed file", "damaged file"):
                self.observer.noted(
                    f"{flaw.message}, and stays as it is: to have it written again, remove it and "
                    "run the same command again"
                )

    def _find_done(self) -> None:
        """Add units of the journal, where other runs may have recorded some too."""
        for unit in self.plan.units:
            if unit.key not in self.done:
                record = self.state.intact_record(unit, self.journal.read_unit(unit.key))
                if record is not None:
                    self._mark_done(unit.key, record)

    def _mark_done(self, key: str, record: Record) -> None:
        self.done.add(key)
        self.errors.add(record)

    def _withdraw(self, existed: bool) -> None:
        """Remove the state directory after a run that found nothing and finished nothing.

        A run that has the setup lock needs these files, so the wait for it is short.
        """
        with contextlib.suppress(OSError, KtconvError):
            if self.journal.directory.exists():
                with self.lock.setup_lock(patience=WITHDRAW_SECONDS):
                    if not self.state.nothing_is_kept():
                        return
                    if not self.lock.try_acquire(self._all_bytes()):
                        return
                    remove(self.journal.directory, but_held=True)
                self.lock.release()
            remove_empty(self.journal.directory)
            if not existed:
                remove_empty(self.output)

    def _check_disk(self, pending: Sequence[Unit]) -> None:
        needed = self.preflight.disk_needed(pending)
        free = machine.disk_free(self.output)
        if needed > free:
            raise DiskSpaceError(
                f"{self.output} has {format_size(free)} free, but {format_size(needed)} are needed",
                "free some space or choose another disk",
            )

    def _check_scales(self, pending: Sequence[Unit]) -> None:
        """CheckpointError for a scale that cannot be one."""
        chosen = scaled_layers(self.plan, pending)
        if chosen is None:
            return
        nbytes = scales_bytes(chosen)
        if nbytes > SCAN_BYTES:
            self.observer.noted(f"checking {format_size(nbytes)} of scales")
        found = scan_scales(chosen, self.reader(), self.preflight.threads)
        layers = {unit.layer.index: unit for unit in pending if isinstance(unit, LayerUnit)}
        self._zero_scales = {layers[index].key: zeros for index, zeros in found.items()}

    # ---- converting ----

    def convert(self, pending: Sequence[Unit]) -> None:
        """Convert these units; each is journaled as soon as it is final."""
        self.observer.begin([unit.key for unit in pending])
        self.run_pipeline(pending)

    def run_pipeline(self, units: Sequence[Unit]) -> None:
        try:
            Pipeline(self.preflight.threads, self.buffers(), self, self.observer).run(units)
        finally:
            for reader in self._readers.values():
                reader.close()

    def confirm(self, unit: Unit) -> None:
        """SourceChangedError where the source is not what it was."""
        reader = self._readers.pop(unit.key)
        try:
            reader.confirm()
            self._zero_scales.setdefault(unit.key, reader.zero_scales)
        finally:
            reader.close()
        store_of(self.plan.checkpoint.path).confirm()

    def finished(self, unit: Unit, files: list[dict[str, object]], tensors: dict[str, Any]) -> None:
        """Journal a unit whose files are final."""
        self.record(unit, {"files": files, "tensors": tensors} | self.unit_facts(unit))

    def record(self, unit: Unit, record: Record) -> None:
        """Enter a unit, whose files are final, in the journal."""
        self.journal.write_unit(unit.key, record)
        self._mark_done(unit.key, record)

    def stage(self, unit: Unit) -> Staging:
        """Staging of a unit, to which its tensors are written until they are final."""
        return staging_of(unit, self.journal.directory, self.output)

    def tasks(self, unit: Unit) -> list[Task]:
        reader = self._readers[unit.key] = self.reader().keeping()
        tasks = [self.copy_task(reader, tensor, name) for tensor, name in unit.copies]
        return tasks + list(self.expert_tasks(unit, reader) if isinstance(unit, LayerUnit) else [])

    # ---- after converting ----

    def _finish(self) -> None:
        """Write index and manifest, if every unit is there and no other run is at work."""
        if not self.journal.has_run():
            return  # a run that shares the work has finished it meanwhile
        self._find_done()
        missing = self._missing()
        if self.request.finalize:
            if missing:
                raise OutputError(
                    f"{self.output} cannot be finalized: {describe_units(missing)} missing",
                    "convert them first: run the same command without --finalize",
                )
            self.lock.acquire(self._all_bytes(), "this model")
        if not missing and self.lock.try_acquire(self._all_bytes()):
            self._write_final_files()

    def _missing(self) -> list[str]:
        return [unit.key for unit in self.plan.units if unit.key not in self.done]

    def _write_final_files(self) -> None:
        staging, plan = self.journal.directory, self.plan
        written = {}
        if (directory := plan.checkpoint.side_directory) is not None:
            written = copy_sidecars(plan.sidecars, directory, self.output, staging)
        written |= write_made_files(self.made_files(), self.output, staging)
        write_durably(self.output / CARD, self.card().encode(), staging)
        units = ((unit.key, self._record(unit)) for unit in plan.units)
        run = run_record(plan) | adapters_record(plan)
        run |= self.state.claim() | self.origin()
        run |= self.about_made_files() | {RECORDS: written}
        write_manifest(run, units, self.output, staging)
        if plan.target.has_index:
            write_index(self.state.weight_map(), plan.total_size, self.output, staging)
        with translated("remove", staging):
            self.journal.run_file.unlink()  # from here on the manifest records the state
            sync(staging)
        shutil.rmtree(staging, ignore_errors=True)

    def _record(self, unit: Unit) -> Record:
        """The record of a finished unit; read one at a time, since all can exceed the buffers."""
        record = self.journal.read_unit(unit.key)
        if record is None:
            raise OutputError(
                f"the journal of {self.output} has no record of {unit.key} any more",
                "run the same command again",
            )
        return record

    def _report(self, pending: Sequence[Unit], started: float) -> Report:
        converted = [unit.key for unit in pending if unit.key in self.done]
        complete = not self.journal.has_run() and (self.output / MANIFEST).exists()
        errors, layers = self.errors, self.preflight.plan.checkpoint.layers
        return Report(
            preflight=self.preflight,
            converted=converted,
            kept=sorted(self.done - set(converted)),
            missing=[] if complete else self._missing(),
            complete=complete,
            seconds=time.monotonic() - started,
            source_bytes=sum(unit.source_bytes for unit in pending),
            worst=errors.worst,
            mean_error=errors.mean,
            zero_scales=errors.zero_scales,
            lost=errors.lost,
            lost_names=[name_in_model(name, layers) for name in errors.lost_names],
            more=self.more() if complete else {},
        )
