"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

    report = quantize_cpu(Request(model="path/to/model", output=Path("out")))

Planning is here and in `plan`; how a run locks, resumes and finishes is in `conversion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktconv import native
from ktconv.checkpoint import Checkpoint, open_checkpoint, read_map
from ktconv.conversion.pipeline import OPEN_UNITS, Observer, Task
from ktconv.conversion.plan import LayerUnit
from ktconv.conversion.run import (
    BaseRequest,
    Conversion,
    Report,
    check_output,
    fit_memory,
    refuse_nested,
)
from ktconv.conversion.run import Preflight as AnyPreflight
from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.placement.expert_sets import check_expert_set, read_expert_set
from ktconv.quantize_cpu.folding import FoldTask, check_foldable, fold_memory, fold_notes
from ktconv.quantize_cpu.integers import integer_notes
from ktconv.quantize_cpu.task import QuantizeTask, quantize_buffers
from ktconv.reading.buffers import BufferSizes
from ktconv.reading.reader import SourceReader
from ktconv.system import machine
from ktconv.targets.card import model_card
from ktconv.targets.ktransformers import (
    NO_KTRANSFORMERS,
    KTransformersTarget,
    Options,
    Plan,
    make_plan,
)

if TYPE_CHECKING:
    from ktconv.quantize_cpu.importance import ExpertWeights


@dataclass(frozen=True)
class Request(BaseRequest):
    """What to convert and how. `options.numa` of 0 means one part per NUMA node."""

    options: Options = field(default_factory=Options)
    exclude_experts: Path | None = None  # a file of expert_sets: experts that are left out
    allow_partial: bool = False  # with exclude_experts: KTransformers crashes on such an output
    importance: Path | None = None  # a file of it: what squared errors of each channel count


@dataclass(frozen=True)
class Preflight(AnyPreflight[KTransformersTarget]):
    """A planned conversion; what `--dry-run` prints."""

    request: Request
    weights: ExpertWeights | None = None  # of squared errors; None: all count the same


def prepare(request: Request) -> Preflight:
    """Open the checkpoint and plan. Reads headers only and writes nothing."""
    if request.overwrite and request.finalize:
        raise UsageError(
            "--overwrite and --finalize cannot be combined: the first removes what "
            "the second completes",
            "use one of them",
        )
    native.isa()  # reports an unusable KTCONV_ISA before an hour of work
    options = request.options
    if options.numa == 0:
        options = replace(options, numa=machine.numa_nodes())
    checkpoint = open_checkpoint(
        request.model, request.config, read_map(request.map), request.tower
    )
    refuse_nested(checkpoint.path, request.output)
    if request.exclude_experts is not None:
        if not request.allow_partial:
            raise UsageError(
                NO_KTRANSFORMERS,
                "convert without --exclude-experts, since KTransformers places experts by itself "
                "(docs/hot-experts.md); or add --allow-partial to convert for ktconv's own runtime",
            )
        excluded = read_expert_set(request.exclude_experts, "--exclude-experts")
        layers = {layer.index: len(layer.experts) for layer in checkpoint.layers}
        check_expert_set(excluded, layers, request.exclude_experts)
        options = replace(options, exclude_experts=excluded)
    weights = _weights(request, checkpoint, options)
    options = replace(options, importance=weights.record if weights else None)
    plan = make_plan(checkpoint, options)
    check_foldable(plan.moe_layers, options)
    notes = [*plan.notes, *integer_notes(plan.moe_layers, options)]
    notes += fold_notes(plan.moe_layers, options)
    plan = replace(plan, notes=[*notes, *(weights.notes if weights else ())])
    check_output(plan, request.output)
    units = plan.layer_units(request.layers)
    kept = weights.memory(min(OPEN_UNITS, len(units))) if weights else 0
    threads, peak = fit_memory(request, _memory(plan), kept)
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, weights)


def _weights(request: Request, checkpoint: Checkpoint, options: Options) -> ExpertWeights | None:
    """What errors count. UsageError for a file that cannot be used, and for none where those of an
    output that is converted again followed from one."""
    if request.importance is None:
        if options.importance is None:
            return None
        raise UsageError(
            f"the weights were converted with --importance {options.importance.file}, without "
            "which other scales would result",
            "convert the model again: ktconv quantize-cpu MODEL OUTPUT --importance FILE",
        )
    if options.scale != "search":
        raise UsageError(
            "--importance says what the errors count that --scale search makes small, and cannot "
            f"be combined with {'--compat' if options.compat else f'--scale {options.scale}'}",
            "omit one of them",
        )
    from ktconv.quantize_cpu.importance import open_weights

    layers = [layer for layer in checkpoint.layers if options.mtp or not layer.is_mtp]
    return open_weights(request.importance, checkpoint, layers)


def quantize_cpu(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Convert; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    preflight = preflight or prepare(request)
    return QuantizeCpu(preflight, observer or Observer()).run()


def _memory(plan: Plan) -> int:
    """Bytes of one worker."""
    return _buffers(plan).nbytes + fold_memory(plan.moe_layers, plan.target.options)


def _buffers(plan: Plan) -> BufferSizes:
    return quantize_buffers(plan.moe_layers, FORMATS[plan.target.options.method])


class QuantizeCpu(Conversion):
    """One run of a planned conversion."""

    plan: Plan

    def __init__(self, preflight: Preflight, observer: Observer) -> None:
        super().__init__(preflight, observer)
        self._weights = preflight.weights

    def buffers(self) -> BufferSizes:
        return _buffers(self.plan)

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        verify, options = self.request.verify, self.plan.target.options
        weights = self._weights.layer(unit.layer.index) if self._weights else None
        for expert in unit.experts:
            tasks = {
                proj: QuantizeTask(
                    reader, unit.layer, expert, proj, verify, options,
                    weights.of(expert, proj) if weights else None,
                )
                for proj in unit.layer.projections
            }  # fmt: skip
            if options.fold:
                yield tasks["gate"]
                yield FoldTask(tasks["up"], tasks["down"])
            else:
                yield from tasks.values()

    def card(self) -> str:
        return model_card(self.plan)
