"""Plans and runs a conversion of a checkpoint's experts to GGUF, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from ktconv.conversion.pipeline import OPEN_UNITS, Observer, Task
from ktconv.conversion.plan import LayerUnit, Unit, plan_checkpoint
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
from ktconv.errors import UsageError
from ktconv.quantize.gguf.task import StackTask, stack_buffers
from ktconv.quantize.packed.importance.load import ExpertWeights, open_weights
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system import machine
from ktconv.system.stores import MadePath
from ktconv.targets.gguf.beside import Beside, open_beside
from ktconv.targets.gguf.card import gguf_card
from ktconv.targets.gguf.target import GgufTarget, Options, Plan
from ktconv.targets.second_rounding import refuse_second_rounding


class Request(BaseRequest, frozen=True):
    """The request: what to convert and how."""

    options: Options = field(default_factory=Options)
    importance: Path | None = None  # a file of what squared errors of each channel count
    beside: Path | None = None  # a GGUF model, from which everything but experts is taken


class Preflight(AnyPreflight[GgufTarget], frozen=True):
    """A planned conversion; what `--dry-run` prints."""

    request: Request
    weights: ExpertWeights | None


def prepare(request: Request) -> Preflight:
    """Open the checkpoint and plan. Reads headers only and writes nothing."""
    check_request(request)
    checkpoint, options = open_checkpoint(request.source), request.options
    refuse_nested(checkpoint.path, request.output)
    layers = checkpoint.converted(options.mtp)
    beside = None if request.beside is None else open_beside(request.beside)
    if beside is not None:
        refuse_nested(beside.checkpoint.path, request.output)
    weights = None
    if request.importance is not None:
        weights = open_weights(request.importance, checkpoint, layers)
        options = replace(options, importance=weights.record)
    if beside is not None:
        _refuse_changed_others(checkpoint, beside)
        options = replace(options, beside=beside.record())
        checkpoint = replace(checkpoint, other_tensors=beside.checkpoint.other_tensors)
    target = GgufTarget(options, checkpoint, beside)
    plan = plan_checkpoint(checkpoint, target)
    notes = [*plan.notes, *target.notes, *(weights.notes if weights else ())]
    plan = replace(plan, notes=notes)
    if not options.requantize:
        kinds = (matrix for layer in plan.moe_layers for matrix in layer.kinds)
        refuse_second_rounding(checkpoint, kinds, f"--method {options.method}")
    units = plan.layer_units(request.layers)
    shared = weights.memory(min(OPEN_UNITS, len(units))) if weights else 0
    each = stack_buffers(target, plan.moe_layers).nbytes
    threads, peak = fit_memory(request, checkpoint, each, shared)
    check_output(plan, request.output)
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, weights)


def _refuse_changed_others(checkpoint: Checkpoint, beside: Beside) -> None:
    """UsageError for adapters of other weights than experts, which `beside` has without them."""
    whole = checkpoint.unpruned or checkpoint
    made = (one.name for one in whole.other_tensors if isinstance(one.file, MadePath))
    if whole.adapters and (name := next(made, None)) is not None:
        raise UsageError(
            f"--adapter changes {name}, which --with {beside.checkpoint.path} has without it",
            "merge the adapter into the model first, and give --with a GGUF file of the result; "
            "or leave --with out, for the experts alone",
        )


def to_gguf(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Convert; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    return ToGguf(preflight or prepare(request), observer or Observer()).run()


class ToGguf(Conversion):
    """One run of a planned conversion."""

    plan: Plan
    preflight: Preflight

    def reader(self) -> SourceReader:
        beside, own = self.plan.target.beside, super().reader()
        if beside is None:
            return own
        return own.joined(SourceReader(beside.checkpoint.files, beside.checkpoint.sources))

    def convert(self, pending: Sequence[Unit]) -> None:
        """Converts, if the file of --with is of this model. Adapters may have changed experts."""
        beside, checkpoint = self.plan.target.beside, self.plan.checkpoint
        if beside is not None and not checkpoint.adapters:
            beside.check_likeness(self.reader(), self.plan.moe_layers[0])
        super().convert(pending)

    def buffers(self) -> BufferSizes:
        return stack_buffers(self.plan.target, self.plan.moe_layers)

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        found = self.preflight.weights
        weights = found.layer(unit.layer.index) if found else None
        for proj in unit.layer.projections:
            yield StackTask(
                reader, unit.layer, proj, self.request.verify, self.plan.target, weights
            )

    def card(self) -> str:
        return gguf_card(self.plan, self.source_card, self.errors)
