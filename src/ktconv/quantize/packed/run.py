"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

    report = quantize_cpu(Request(model="path/to/model", output=Path("out")))

Planning is here and in `plan`; how a run locks, resumes and finishes is in `conversion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import field
from msgspec.structs import replace

from ktconv.conversion.pipeline import OPEN_UNITS, Observer, Task
from ktconv.conversion.plan import LayerUnit, Unit
from ktconv.conversion.run import (
    BaseRequest,
    Conversion,
    Report,
    check_output,
    check_request,
    fit_memory,
    refuse_nested,
)
from ktconv.conversion.run import Preflight as AnyPreflight
from ktconv.conversion.together import together, with_room
from ktconv.errors import UsageError
from ktconv.quantize.packed.task import alone, quantize_together
from ktconv.quantize.packed.ways import Asked, Expert, Way, ways_of_table
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
from collections.abc import Iterable

from ktconv.source import BlockGrid, ExpertMatrix, MoELayer


class Request(BaseRequest, frozen=True):
    """The request: what to convert and how. `options.numa` of 0 means one part per NUMA node."""

    options: Options = field(default_factory=Options)
    exclude_experts: Path | None = None  # a file of expert_sets: experts that are left out
    allow_partial: bool = False  # with exclude_experts: KTransformers crashes on such an output
    # What squared errors of each channel count: a file of it, or "weights": by the model's own.
    importance: Path | Literal["weights"] | None = None
    # A directory of second moments, or a text: codes make up for one another's errors.
    calibrate: Path | None = None
    # Values of the options of ways that have no field, by their names.
    ways: Mapping[str, Any] = field(default_factory=dict)


class Preflight(AnyPreflight[KTransformersTarget], frozen=True):
    """A planned conversion; what `--dry-run` prints."""

    request: Request
    ways: Sequence[Way]  # to choose codes: the rule for scales first
    buffers: BufferSizes  # of a worker

    def passing_bytes(self, units: Sequence[Unit]) -> int:
        """Bytes that a pass over a text takes on the disk; 0 where `units` need none."""
        return sum(way.passing_bytes(units) for way in self.ways)

    @property
    def weights(self) -> ExpertWeights | SourceWeights | None:
        """The weights of squared errors; None: all errors count the same."""
        from ktconv.quantize.packed.importance.way import Importance

        return next((way.found for way in self.ways if isinstance(way, Importance)), None)


def prepare(request: Request) -> Preflight:
    """Open the checkpoint and plan. Reads headers only and writes nothing."""
    check_request(request)
    options = request.options
    if options.numa == 0:
        options = replace(options, numa=machine.numa_nodes())
    checkpoint = open_checkpoint(request.source)
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
    ways = [way for kind in ways_of_table(asked) if (way := kind.open(asked)) is not None]
    facts = {way.option: way.facts for way in ways if way.facts is not None}
    if lost := sorted(options.ways.keys() - facts.keys()):
        raise UsageError(
            f"the weights were converted with --{lost[0].replace('_', '-')}, without which other "
            "codes would result",
            "convert the model again, with that option",
        )
    # Not those of an output that is made again.
    options = replace(options, importance=None, calibrate=None, ways=facts)
    for way in ways:
        options = replace(options, **way.record)
    plan = make_plan(checkpoint, options)
    units = plan.layer_units(request.layers)
    rounded, integers = treated(plan.moe_layers, options)
    refuse_second_rounding(checkpoint, rounded, f"--method {options.method}")
    for way in ways:
        way.check(plan)
    notes = [*plan.notes, *integers, *(note for way in ways for note in way.notes(plan))]
    plan = replace(plan, notes=notes)
    open_units = min(OPEN_UNITS, len(units))
    shared = sum(way.shared_memory(open_units) for way in ways)
    buffers = BufferSizes()
    for more in filter(None, (way.buffers(plan) for way in ways)):
        buffers = buffers.with_those_of(more)
    each = buffers.nbytes + sum(way.worker_memory(plan) for way in ways)
    threads, peak = fit_memory(request, checkpoint, each, shared)
    buffers, peak = with_room(request, buffers, threads, peak)
    refuse_nested(checkpoint.path, request.output)
    check_output(plan, request.output)
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, ways, buffers)


def quantize_cpu(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Convert; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    preflight = preflight or prepare(request)
    return QuantizeCpu(preflight, observer or Observer()).run()


class QuantizeCpu(Conversion):
    """One run of a planned conversion."""

    plan: Plan
    preflight: Preflight

    @property
    def ways(self) -> Sequence[Way]:
        return self.preflight.ways

    def buffers(self) -> BufferSizes:
        return self.preflight.buffers

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        """Tasks of each expert, from the ways one after the other: first the rule for scales."""
        return together(self._expert_tasks(unit, reader), alone, quantize_together)

    def _expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        layer, verify, options = unit.layer, self.request.verify, self.plan.target.options
        given = (way.weights(layer.index) for way in self.ways)
        weights = next((one for one in given if one is not None), None)
        for number in unit.experts:
            expert = Expert(reader, layer, number, verify, options, weights)
            tasks: list[Task] = []
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


# ---- sources of integers -------------------------------------------------------------------


def may_be_kept(matrix: ExpertMatrix) -> bool:
    """Whether it has integers with one scale per row, as packed rows have."""
    scale = matrix.scale
    whole = scale is not None and scale.block_cols >= matrix.cols
    return matrix.element.integer_zero is not None and whole


def treated(
    layers: Iterable[MoELayer], options: Options
) -> tuple[Sequence[ExpertMatrix], Sequence[str]]:
    """Matrices that are rounded although --requantize does not ask for it, one of each kind in a
    layer; and a sentence for every way in which integers of the source are treated."""
    kinds = [matrix for layer in layers for matrix in layer.kinds]
    integers = (matrix for matrix in kinds if matrix.element.integer_zero is not None)
    rounded = [] if options.requantize else [one for one in kinds if not may_be_kept(one)]
    return rounded, list(dict.fromkeys(_note_of_integers(matrix, options) for matrix in integers))


def _note_of_integers(matrix: ExpertMatrix, options: Options) -> str:
    if options.calibrate is not None:
        return "integers of the source are quantized again: --calibrate"
    if options.requantize or options.compat:
        option = "--requantize" if options.requantize else "--compat"
        return f"integers of the source are quantized again: {option}"
    found, scale = matrix.quantization, matrix.scale
    assert found is not None
    assert scale is not None
    if scale.block_cols < matrix.cols:
        return (
            f"integers with a scale for {scale.block_cols} inputs are quantized again, because "
            "packed rows have one scale each"
        )
    if isinstance(found.zero_point, BlockGrid):
        return (
            "integers with one scale per row are kept unchanged where all zero points of a matrix "
            "are symmetric and no number is beyond the packed levels; other rows are quantized "
            "again"
        )
    return (
        "integers with one scale per row are kept unchanged; only rows with a number beyond the "
        "packed levels (-128 in INT8, -8 in INT4) are quantized again"
    )
