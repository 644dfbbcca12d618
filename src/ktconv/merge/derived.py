"""A conversion whose source is packed weights: `quantize_cpu.Conversion` with other tasks.

Journal, locks, resume, disk check, pipeline and final files are those of quantize-cpu. What
differs is where the bytes come from; the record of that (`Outlook.origin`) is written into
run.json and manifest, and a run into an output with another one is refused.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ktconv import __version__, machine, quantize_cpu
from ktconv.errors import OutputError, UsageError
from ktconv.merge.tasks import check_sum
from ktconv.output import OutputState
from ktconv.pipeline import Job, Observer, Pipeline, Span, Task
from ktconv.plan import Plan, Unit
from ktconv.quantize_cpu import MANIFEST_EXPANSION, MEMORY_MARGIN, Conversion, run_record
from ktconv.source import SourceReader
from ktconv.tasks import COPY_BYTES, Buffers, BufferSizes, CopyTask
from ktconv.units import format_ranges, format_size
from ktconv.writer.files import sync_directory, translated
from ktconv.writer.finish import (
    copy_sidecars,
    read_manifest,
    write_card,
    write_index,
    write_manifest,
)
from ktconv.writer.journal import Journal, Record, differences
from ktconv.writer.staging import Staging

BufferedTask: TypeAlias = "Task[Buffers]"
BUFFERS = BufferSizes(2 * COPY_BYTES, 0, 1)
MOST_THREADS = 8  # copying is bound by the disk


@dataclass(frozen=True, slots=True)
class Outlook(quantize_cpu.Outlook):
    """A planned job with what it will need here, and what its bytes come from."""

    origin: Record  # for run.json and manifest: {"merged_from": {...}}
    about: str  # for the model card: what the weights come from
    base: str | None  # the model's name, if it is known
    command: str  # the command that was given


@dataclass(frozen=True, slots=True)
class CheckedCopy:
    """One other tensor, copied unchanged, with the checksum that its manifest tells."""

    copy: CopyTask
    known: Mapping[str, Record]

    @property
    def source_bytes(self) -> int:
        return self.copy.source_bytes

    def spans(self) -> Sequence[Span]:
        return self.copy.spans()

    def run(
        self, staging: Staging, buffers: Buffers, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        result, name = self.copy.run(staging, buffers, advance), self.copy.name
        check_sum(
            result[name]["sha256"], self.known.get(name), f"{name} in {self.copy.tensor.file}"
        )
        return result


class DerivedState(OutputState):
    """The output of a derived conversion: its records tell the origin too."""

    def __init__(self, plan: Plan, journal: Journal, origin: Record) -> None:
        super().__init__(plan, journal)
        self._origin = origin

    def claim(self) -> Record:
        return super().claim() | self._origin


class Derived(Conversion, ABC):
    """One run; subclasses say which tasks a layer takes."""

    def __init__(self, outlook: Outlook, observer: Observer) -> None:
        super().__init__(outlook, observer)
        self.derived = outlook
        self.state = DerivedState(self.plan, self.journal, outlook.origin)

    @abstractmethod
    def layer_tasks(self, unit: Unit) -> Iterator[BufferedTask]:
        """What writes the experts of a unit."""

    def _resume(self, claimed: Sequence[Unit]) -> bool:
        there = self.journal.read_run() or read_manifest(self.output)
        if there is not None:
            self._refuse_other_origin(there)
        return super()._resume(claimed)

    def _refuse_other_origin(self, there: Record) -> None:
        ours = self.derived.origin
        found = differences(ours, {key: there.get(key) for key in ours})
        if found:
            raise OutputError(
                f"{self.output} was begun from other files than these: {found[0]}",
                "use the same files to continue (copies must have their modification times: "
                "cp -p), or --overwrite to start again",
            )

    def _convert(self, pending: Sequence[Unit]) -> None:
        pipeline = Pipeline(self.outlook.threads, lambda: Buffers(BUFFERS), self.observer)
        pipeline.run(self._job(unit) for unit in pending)

    def _job(self, unit: Unit) -> Job[Buffers]:
        job = super()._job(unit)
        job.tasks = lambda: list(self._all_tasks(unit))
        return job

    def reader(self) -> SourceReader:
        """What reads the other tensors."""
        checkpoint = self.plan.checkpoint
        return SourceReader(checkpoint.files, checkpoint.sources)

    def known_copies(self) -> Mapping[str, Record]:
        """What a manifest tells of the other tensors."""
        return {}

    def _all_tasks(self, unit: Unit) -> Iterator[BufferedTask]:
        reader, known = self.reader(), self.known_copies()
        for tensor, name in unit.copies:
            yield CheckedCopy(CopyTask(reader, tensor, name, self.request.verify), known)
        if unit.layer is not None:
            yield from self.layer_tasks(unit)

    def _write_final_files(self) -> None:
        staging, plan = self.journal.directory, self.plan
        copy_sidecars(plan.sidecars, plan.checkpoint.path, self.output, staging)
        write_card(card(self.derived), self.output, staging)
        units = ((unit.key, self._record(unit)) for unit in plan.units)
        write_manifest(run_record(plan) | self.state.claim(), units, self.output, staging)
        write_index(self.state.weight_map(), plan.total_size, self.output, staging)
        with translated("remove", staging):
            self.journal.run_file.unlink()
            sync_directory(staging)
        shutil.rmtree(staging, ignore_errors=True)


def check_output(plan: Plan, output: Path) -> None:
    """Refuse an output directory that holds foreign files."""
    OutputState(plan, Journal(output)).refuse_foreign_files()


def refuse_nested(output: Path, source: Path) -> None:
    """An output inside of what is read would become part of it."""
    inside, outside = output.resolve(), source.resolve()
    if inside == outside or outside in inside.parents:
        raise UsageError(
            f"the output {output} lies inside of {source}", "choose a directory outside of it"
        )


def expected_memory(threads: int, per_thread: int, manifests: Sequence[Path]) -> int:
    """The peak to expect; the manifests are read at once."""
    base = machine.resident_memory() + MEMORY_MARGIN
    known = sum(path.stat().st_size for path in manifests if path.is_file())
    return base + MANIFEST_EXPANSION * known + threads * (BUFFERS.nbytes + per_thread)


def card(outlook: Outlook) -> str:
    """README.md of the output: what it holds and where that comes from."""
    plan = outlook.plan
    layers = [unit.layer for unit in plan.layers if unit.layer]
    experts = sorted({len(layer.experts) for layer in layers})
    content = "all tensors" if plan.others else "expert weights only"
    base = f"base_model: {json.dumps(outlook.base, ensure_ascii=False)}\n" if outlook.base else ""
    return f"""---
{base}library_name: ktransformers
tags:
- ktconv
- mixture-of-experts
- {plan.options.method}
---

# CPU experts in {plan.format.name}

Routed experts for KTransformers' CPU kernels, from {outlook.about}:
{plan.format.name}, {plan.options.numa} NUMA part(s), {content}, {format_size(plan.output_bytes)}.

- MoE layers: {format_ranges([layer.index for layer in layers])}
- Experts per layer: {", ".join(map(str, experts))}
- Tensors: `blk.{{layer}}.ffn_{{gate,up,down}}_exps.{{expert}}.numa.{{part}}.{{weight,scale}}`
- `ktconv.json` holds a checksum of every tensor.

Made with ktconv {__version__}:

    {outlook.command}
"""
