"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

    report = quantize_cpu(Request(model="path/to/model", output=Path("out")))

Planning is here and in `plan`; how a run locks, resumes and finishes is in `conversion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ktconv import native
from ktconv.conversion.pipeline import OPEN_UNITS, Observer, Task
from ktconv.conversion.plan import LayerUnit, Unit
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
from ktconv.quantize.packed.backward import Backward
from ktconv.quantize.packed.folding import Folding
from ktconv.quantize.packed.gptq.way import Compensation
from ktconv.quantize.packed.importance.way import Importance
from ktconv.quantize.packed.integers import integer_notes, may_be_kept
from ktconv.quantize.packed.task import QuantizeTask, quantize_buffers
from ktconv.quantize.packed.ways import Asked, Expert, Way
from ktconv.source import open_checkpoint
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system import machine
from ktconv.targets.card import model_card
from ktconv.targets.expert_sets import check_expert_set, read_expert_set
from ktconv.targets.packed.target import (
    NO_KTRANSFORMERS,
    KTransformersTarget,
    Options,
    Plan,
    make_plan,
)
from ktconv.targets.second_rounding import refuse_second_rounding
from ktconv.writer.journal import Record

if TYPE_CHECKING:
    from ktconv.quantize.packed.importance.load import ExpertWeights
    from ktconv.quantize.packed.importance.source_weights import SourceWeights


@dataclass(frozen=True)
class Request(BaseRequest):
    """The request: what to convert and how. `options.numa` of 0 means one part per NUMA node."""

    options: Options = field(default_factory=Options)
    exclude_experts: Path | None = None  # a file of expert_sets: experts that are left out
    allow_partial: bool = False  # with exclude_experts: KTransformers crashes on such an output
    # What squared errors of each channel count: a file of it, or "weights": by the model's own.
    importance: Path | Literal["weights"] | None = None
    # A directory of second moments, or a text: codes make up for one another's errors.
    calibrate: Path | None = None


# In the order in which they change the tasks of an expert.
WAYS: tuple[type[Way], ...] = (Folding, Backward, Importance, Compensation)
_DOWN_LAST = ("gate", "up", "down")


@dataclass(frozen=True)
class Preflight(AnyPreflight[KTransformersTarget]):
    """A planned conversion; what `--dry-run` prints."""

    request: Request
    ways: Sequence[Way] = ()  # to choose codes, beside the rule for scales

    @property
    def weights(self) -> ExpertWeights | SourceWeights | None:
        """The weights of squared errors; None: all errors count the same."""
        return next((way.found for way in self.ways if isinstance(way, Importance)), None)


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
    checkpoint = open_checkpoint(request.source)
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
    asked = Asked(request, checkpoint, options)
    ways = [way for kind in WAYS if (way := kind.open(asked)) is not None]
    options = replace(options, importance=None, calibrate=None)  # of an output made again
    for way in ways:
        options = replace(options, **way.record)
    plan = make_plan(checkpoint, options)
    if not options.requantize:
        rounded = (m for layer in plan.moe_layers for m in layer.kinds if not may_be_kept(m))
        refuse_second_rounding(checkpoint, rounded, f"--method {options.method}")
    for way in ways:
        way.check(plan)
    notes = [*plan.notes, *integer_notes(plan.moe_layers, options)]
    plan = replace(plan, notes=[*notes, *(note for way in ways for note in way.notes(plan))])
    check_output(plan, request.output)
    units = plan.layer_units(request.layers)
    open_units = min(OPEN_UNITS, len(units))
    shared = sum(way.shared_memory(open_units) for way in ways)
    each = _buffers(plan, ways).nbytes + sum(way.worker_memory(plan) for way in ways)
    threads, peak = fit_memory(request, checkpoint, each, shared)
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, ways)


def quantize_cpu(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Convert; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    preflight = preflight or prepare(request)
    return QuantizeCpu(preflight, observer or Observer()).run()


def _buffers(plan: Plan, ways: Sequence[Way]) -> BufferSizes:
    sizes = quantize_buffers(plan.moe_layers, FORMATS[plan.target.options.method])
    for way in ways:
        more = way.buffers(plan)
        sizes = sizes if more is None else sizes.with_those_of(more)
    return sizes


class QuantizeCpu(Conversion):
    """One run of a planned conversion."""

    plan: Plan
    preflight: Preflight

    @property
    def ways(self) -> Sequence[Way]:
        return self.preflight.ways

    def buffers(self) -> BufferSizes:
        return _buffers(self.plan, self.ways)

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        """The rule for scales first, which every way starts from."""
        layer, verify, options = unit.layer, self.request.verify, self.plan.target.options
        given = (way.weights(layer.index) for way in self.ways)
        weights = next((one for one in given if one is not None), None)
        for number in unit.experts:
            expert = Expert(reader, layer, number, verify, options)
            tasks: list[Task] = [
                QuantizeTask(
                    reader, layer, number, proj, verify, options,
                    weights.of(number, proj) if weights else None,
                )
                for proj in sorted(layer.projections, key=_DOWN_LAST.index)
            ]  # fmt: skip
            for way in self.ways:
                tasks = way.tasks(expert, tasks)
            yield from tasks
            for way in self.ways:
                yield from way.more_tasks(expert)

    def convert(self, pending: Sequence[Unit]) -> None:
        self.observer.begin([unit.key for unit in pending])
        for way in self.ways:
            pending = way.convert(self, pending)
        self.run_pipeline(pending)

    def more(self) -> Record:
        return {name: fact for way in self.ways for name, fact in way.report().items()}

    def run_pipeline(self, units: Sequence[Unit]) -> None:
        with ExitStack() as stack:
            for way in self.ways:
                stack.enter_context(way.running())
            super().run_pipeline(units)

    def card(self) -> str:
        return model_card(self.plan, self.source_card, self.errors)
