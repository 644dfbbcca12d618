"""Plans and runs a pruning: the checkpoint of the experts that stay, copied byte by byte.

The steps are those of every conversion (`ktconv.conversion`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import LayerUnit, plan_checkpoint
from ktconv.conversion.run import (
    BaseRequest,
    Conversion,
    Report,
    check_output,
    fit_memory,
    refuse_nested,
)
from ktconv.conversion.run import Preflight as AnyPreflight
from ktconv.conversion.tasks import CopyTask
from ktconv.errors import UsageError
from ktconv.prune.choose import Choice, Selection, choose
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.pruning.kept import Pruning, read_pruning
from ktconv.source.pruning.view import PrunedView
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system import machine
from ktconv.targets.pruned import Options, Plan, PrunedTarget, card
from ktconv.writer.option_files import WrittenFile


class Request(BaseRequest, frozen=True):
    """The request: which experts stay. Either `model.prune` or `choice` says it."""

    options: Options = field(default_factory=Options)
    choice: Choice = field(default_factory=Choice)


class Preflight(AnyPreflight[PrunedTarget], frozen=True):
    """A planned pruning; what `--dry-run` prints."""

    request: Request
    selection: Selection | None  # None: the experts that stay were given


def select(request: Request) -> tuple[Checkpoint, Pruning, Selection | None]:
    """The whole checkpoint, and which of its experts stay. UsageError where nothing says it, or two
    things do."""
    source = request.source
    checkpoint = open_checkpoint(replace(source, prune=None))
    given = source.pruning()
    if given is None:
        selection = choose(checkpoint, request.choice)
        return checkpoint, selection.pruning, selection
    if request.choice != Choice():
        raise UsageError(
            "--prune says which experts stay, and so do the options that choose them",
            "omit --prune, or --scores, --keep, --ratio and --target-size",
        )
    return checkpoint, given, None


def prepare(request: Request) -> Preflight:
    """Open the checkpoint, choose and plan. Reads headers and scores only, writes nothing."""
    checkpoint, pruning, selection = select(request)
    refuse_nested(checkpoint.path, request.output)
    view = PrunedView(checkpoint, pruning)
    target = PrunedTarget(request.options, view)
    plan = plan_checkpoint(view.checkpoint(), target)
    notes = [] if selection is None else selection.notes
    plan = replace(plan, notes=[*plan.notes, *notes])
    check_output(plan, request.output)
    threads, peak = fit_memory(request, plan.checkpoint, BufferSizes().nbytes)
    free = machine.disk_free(request.output)
    return Preflight(
        request, plan, plan.layer_units(request.layers), threads, peak, free, selection
    )


def prune(
    request: Request, observer: Observer | None = None, preflight: Preflight | None = None
) -> Report:
    """Write the checkpoint; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state
    kept."""
    return Copy(preflight or prepare(request), observer or Observer()).run()


class Copy(Conversion):
    """Every tensor by itself."""

    plan: Plan
    request: Request

    def buffers(self) -> BufferSizes:
        return BufferSizes()

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        for tensor, name in self.plan.target.experts[unit.layer.index]:
            yield CopyTask(reader, tensor, name, self.request.verify)

    def card(self) -> str:
        return card(self.plan, self.source_card)


def kept_file(path: Path) -> WrittenFile:
    """The file that --write names."""
    return WrittenFile(path, "--write", "a file of kept experts that ktconv wrote", _is_one)


def _is_one(path: Path) -> bool:
    read_pruning(path)
    return True


def write_kept(path: Path, pruning: Pruning) -> None:
    """Replace `path` in one step, with a line for each layer."""
    content = pruning.document()
    layers = content.pop("layers")
    head = json.dumps(content, indent=1)[:-2]
    lines = [f"{json.dumps(layer)}: {json.dumps(one)}" for layer, one in layers.items()]
    text = f'{head},\n "layers": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n"
    kept_file(path).write(text.encode())
