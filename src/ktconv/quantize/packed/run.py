"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

    report = quantize_cpu(Request(model="path/to/model", output=Path("out")))

Planning is here and in `plan`; how a run locks, resumes and finishes is in `conversion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
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
from ktconv.model import require_packages
from ktconv.quantize.packed.backward import (
    BackwardTask,
    backward_buffers,
    backward_memory,
    backward_notes,
)
from ktconv.quantize.packed.folding import FoldTask, check_foldable, fold_memory, fold_notes
from ktconv.quantize.packed.importance.source_weights import NormWeights, SourceWeights, WeighedTask
from ktconv.quantize.packed.integers import integer_notes, may_be_kept
from ktconv.quantize.packed.task import QuantizeTask, quantize_buffers
from ktconv.source import Checkpoint, MoELayer, open_checkpoint
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system import machine
from ktconv.targets.card import model_card
from ktconv.targets.expert_sets import check_expert_set, read_expert_set
from ktconv.targets.packed.target import (
    BY_WEIGHTS,
    NO_KTRANSFORMERS,
    KTransformersTarget,
    Options,
    Plan,
    make_plan,
)
from ktconv.targets.second_rounding import refuse_second_rounding
from ktconv.writer.journal import Journal, Record

if TYPE_CHECKING:
    from ktconv.quantize.packed.gptq.inputs import Calibration
    from ktconv.quantize.packed.gptq.streaming import TextCalibration
    from ktconv.quantize.packed.importance.load import ExpertWeights, LayerWeights


@dataclass(frozen=True)
class Request(BaseRequest):
    """What to convert and how. `options.numa` of 0 means one part per NUMA node."""

    options: Options = field(default_factory=Options)
    exclude_experts: Path | None = None  # a file of expert_sets: experts that are left out
    allow_partial: bool = False  # with exclude_experts: KTransformers crashes on such an output
    # What squared errors of each channel count: a file of it, or "weights": by the model's own.
    importance: Path | Literal["weights"] | None = None
    # A directory of second moments, or a text: codes make up for one another's errors.
    calibrate: Path | None = None


@dataclass(frozen=True)
class Preflight(AnyPreflight[KTransformersTarget]):
    """A planned conversion; what `--dry-run` prints."""

    request: Request
    # Of squared errors; None: all count the same.
    weights: ExpertWeights | SourceWeights | None = None
    calibration: Calibration | TextCalibration | None = None  # None: codes are the nearest


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
    calibration = _calibration(request, checkpoint, options)
    weights = _weights(request, checkpoint, options)
    options = replace(
        options,
        importance=weights.record if weights else None,
        calibrate=calibration.record if calibration else None,
    )
    plan = make_plan(checkpoint, options)
    if not options.requantize:
        rounded = (m for layer in plan.moe_layers for m in layer.kinds if not may_be_kept(m))
        refuse_second_rounding(checkpoint, rounded, f"--method {options.method}")
    check_foldable(plan.moe_layers, options)
    notes = [*plan.notes, *integer_notes(plan.moe_layers, options)]
    notes += [*fold_notes(plan.moe_layers, options), *backward_notes(options)]
    notes += [note for given in (weights, calibration) if given for note in given.notes]
    plan = replace(plan, notes=notes)
    check_output(plan, request.output)
    units = plan.layer_units(request.layers)
    kept = weights.memory(min(OPEN_UNITS, len(units))) if weights else 0
    each = _memory(plan)
    if calibration is not None:
        from ktconv.quantize.packed.gptq.task import expert_memory

        kept += calibration.memory(min(OPEN_UNITS, len(units)))
        each += expert_memory(plan.moe_layers)
    threads, peak = fit_memory(request, checkpoint, each, kept)
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, weights, calibration)


def _weights(
    request: Request, checkpoint: Checkpoint, options: Options
) -> ExpertWeights | SourceWeights | None:
    """What errors count. UsageError for a file that cannot be used, and for none where those of an
    output that is converted again followed from one."""
    layers = [layer for layer in checkpoint.layers if options.mtp or not layer.is_mtp]
    if request.importance is None:
        if options.importance == BY_WEIGHTS:
            return SourceWeights(checkpoint, layers)
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
    if not isinstance(request.importance, Path):
        return SourceWeights(checkpoint, layers)
    from ktconv.quantize.packed.importance.load import open_weights

    return open_weights(request.importance, checkpoint, layers)


def _calibration(
    request: Request, checkpoint: Checkpoint, options: Options
) -> Calibration | TextCalibration | None:
    """The inputs that codes are calibrated on. UsageError for options that exclude one another, and
    for none where an output that is converted again was calibrated."""
    if request.calibrate is None:
        if options.calibrate is None:
            return None
        raise UsageError(
            f"the weights were converted with --calibrate {options.calibrate.name}, without which "
            "other codes would result",
            "convert the model again: ktconv quantize-cpu MODEL OUTPUT --calibrate DIR",
        )
    if options.scale != "search":
        given = "--compat" if options.compat else f"--scale {options.scale}"
        raise UsageError(
            f"--calibrate chooses scales by search, and cannot be combined with {given}",
            "omit one of them",
        )
    if request.importance is not None:
        raise UsageError(
            "--calibrate knows the importance of each channel, and cannot be combined with "
            "--importance",
            "omit --importance",
        )
    if find_spec("torch") is None:
        raise UsageError(
            "--calibrate needs torch, which is not installed",
            "install it with: pip install 'ktconv[model]'",
        )
    layers = [layer for layer in checkpoint.layers if options.mtp or not layer.is_mtp]
    if request.calibrate.is_file():
        return _text_calibration(request, request.calibrate, checkpoint, layers)
    from ktconv.quantize.packed.gptq.inputs import open_calibration

    return open_calibration(request.calibrate, checkpoint, layers)


def _text_calibration(
    request: Request, text: Path, checkpoint: Checkpoint, layers: Sequence[MoELayer]
) -> TextCalibration:
    """UsageError for options that the model cannot be run with."""
    source = request.source
    given = {"layers": request.layers, "map": source.map, "tower": source.tower}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"--{name} cannot be combined with a text for --calibrate, which the whole model "
                "reads by the names of transformers",
                "record second moments first: ktconv stats MODEL --hessian DIR; then give DIR",
            )
    require_packages()
    from ktconv.quantize.packed.gptq.streaming import PASS, TextCalibration

    folder = Journal(request.output).directory / PASS
    return TextCalibration(text, checkpoint, source.config, layers, request.max_memory // 2, folder)


def quantize_cpu(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Convert; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    preflight = preflight or prepare(request)
    return QuantizeCpu(preflight, observer or Observer()).run()


def _memory(plan: Plan) -> int:
    """Bytes of one worker."""
    layers, options = plan.moe_layers, plan.target.options
    more = backward_memory(layers, options) if options.save_backward else 0
    return _buffers(plan).nbytes + fold_memory(layers, options) + more


def _buffers(plan: Plan) -> BufferSizes:
    layers, options = plan.moe_layers, plan.target.options
    sizes = quantize_buffers(layers, FORMATS[options.method])
    return (
        sizes.with_those_of(backward_buffers(layers, options)) if options.save_backward else sizes
    )


def recorded(given: Calibration | TextCalibration | None) -> Calibration | None:
    """Inputs that are in a file; None where a text gives them, or nothing."""
    if given is None:
        return None
    from ktconv.quantize.packed.gptq.inputs import Calibration  # which most conversions do not need

    return given if isinstance(given, Calibration) else None


def text_of(given: Calibration | TextCalibration | None) -> TextCalibration | None:
    """The text that gives inputs; None where a file has them, or nothing."""
    if given is None:
        return None
    from ktconv.quantize.packed.gptq.inputs import Calibration

    return None if isinstance(given, Calibration) else given


class QuantizeCpu(Conversion):
    """One run of a planned conversion."""

    plan: Plan
    preflight: Preflight

    def __init__(self, preflight: Preflight, observer: Observer) -> None:
        super().__init__(preflight, observer)
        self._weights = preflight.weights
        self._calibration = recorded(preflight.calibration)

    def buffers(self) -> BufferSizes:
        return _buffers(self.plan)

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        """Each expert's transposed matrices follow while the page cache has its bytes."""
        layer, verify, options = unit.layer, self.request.verify, self.plan.target.options
        inputs = self._calibration.layer(layer.index) if self._calibration else None
        weights = self._weights.layer(layer.index) if self._weights and not inputs else None
        for expert in unit.experts:
            if inputs is not None:
                from ktconv.quantize.packed.gptq.task import CompensatedExpert

                yield CompensatedExpert(reader, layer, expert, verify, options, inputs)
            else:
                yield from self._searched(layer, expert, reader, weights)
            for proj in layer.projections if options.save_backward else ():
                yield BackwardTask(reader, layer, expert, proj, verify, options)

    def _searched(
        self,
        layer: MoELayer,
        expert: int,
        reader: SourceReader,
        weights: LayerWeights | NormWeights | None,
    ) -> Iterator[Task]:
        """One expert's matrices, whose codes are the nearest."""
        verify, options = self.request.verify, self.plan.target.options
        tasks = {
            proj: QuantizeTask(
                reader, layer, expert, proj, verify, options,
                weights.of(expert, proj) if weights else None,
            )
            for proj in layer.projections
        }  # fmt: skip
        down = tasks.pop("down")
        last = FoldTask(tasks.pop("up"), down) if options.fold else down
        yield from tasks.values()
        if isinstance(self._weights, SourceWeights):
            yield WeighedTask(last, self._weights)
        else:
            yield last

    def convert(self, pending: Sequence[Unit]) -> None:
        """Convert the layers that a text passes first, each once its inputs exist."""
        text = text_of(self.preflight.calibration)
        if text is None:
            super().convert(pending)
            return
        from ktconv.quantize.packed.gptq.coverage import coverage_lines

        self.observer.begin([unit.key for unit in pending])
        units = {unit.layer.index: unit for unit in self.plan.layers}
        waiting = {index for index in text.layers if units[index] in pending}

        def ready(layer: int, inputs: Calibration) -> None:
            self._calibration = inputs
            self.run_pipeline([units[layer]])
            self._calibration = None
            waiting.discard(layer)

        if waiting:
            text.run(lambda layer: units[layer].key in self.done, ready, self.observer.noted)
            for line in coverage_lines(text.counts):
                self.observer.noted(line)
        calibrated = {units[index].key for index in text.layers}
        self.run_pipeline([unit for unit in pending if unit.key not in calibrated])

    def more(self) -> Record:
        """Tokens of experts in the layers that a text has passed in this run."""
        text = text_of(self.preflight.calibration)
        if text is None or not text.counts:
            return {}
        from ktconv.quantize.packed.gptq.coverage import coverage_facts

        return {"calibration_coverage": coverage_facts(text.counts)}

    def run_pipeline(self, units: Sequence[Unit]) -> None:
        if self._calibration is None:
            super().run_pipeline(units)
            return
        from ktconv.quantize.packed.gptq.threads import one_torch_thread

        with one_torch_thread():  # for each worker
            super().run_pipeline(units)

    def card(self) -> str:
        return model_card(self.plan, self.source_card, self.errors)
