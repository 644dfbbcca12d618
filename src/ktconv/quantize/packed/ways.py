"""Ways to choose codes beside the rule for scales: one object each, over which `run` loops.

A way is an option of quantize-cpu that changes the plan, the tasks of an expert, or what memory a
run takes. A new one is a subclass of `Way` in a file of its own, and a row in `run.WAYS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ktconv.conversion.pipeline import Task
from ktconv.source import Checkpoint, MoELayer, Projection
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system.arrays import F32
from ktconv.targets.packed.target import Options, Plan

if TYPE_CHECKING:
    from ktconv.conversion.plan import Unit
    from ktconv.quantize.packed.importance.load import LayerWeights
    from ktconv.quantize.packed.importance.source_weights import NormWeights
    from ktconv.quantize.packed.run import QuantizeCpu, Request


@dataclass(frozen=True, slots=True)
class Asked:
    """What a conversion is asked to do, before it is planned."""

    request: Request
    checkpoint: Checkpoint
    options: Options

    @property
    def layers(self) -> Sequence[MoELayer]:
        """The layers of the model that are converted."""
        return [one for one in self.checkpoint.layers if self.options.mtp or not one.is_mtp]


@dataclass(frozen=True, slots=True)
class Expert:
    """An expert whose matrices become tasks."""

    reader: SourceReader
    layer: MoELayer
    number: int
    verify: bool
    options: Options


LAYERS_KEPT = 2  # with weights in memory, while verify reads an output


@dataclass(frozen=True, slots=True)
class ErrorWeights:
    """What squared errors count: of a matrix [inputs], None: all the same; and bytes of memory."""

    of: Callable[[int, int, Projection], F32 | None]  # layer, expert, projection
    memory: int


@dataclass(frozen=True, slots=True)
class Converted:
    """An output whose matrices are to be proven, with its source."""

    directory: Path
    options: Options
    checkpoint: Checkpoint
    layers: Sequence[MoELayer]


class Way:
    """One way, as a conversion uses it. The methods here change nothing."""

    option: ClassVar[str] = ""  # whose file verify needs, to prove what follows from it

    record: Mapping[str, Any] = MappingProxyType({})  # fields of Options that say what was used

    @staticmethod
    def open(asked: Asked) -> Way | None:
        """None where it is not asked for. UsageError for what it cannot be combined with, and for
        inputs that cannot be used."""
        raise NotImplementedError

    @staticmethod
    def error_weights(output: Converted, given: Path | None) -> ErrorWeights | None:
        """What the search for scales of an output minimized, by its source and the file that is
        given; None: nothing, or it is not known. UsageError for another file than the conversion
        was given."""
        return None

    @staticmethod
    def unproven(options: Options, codes: Sequence[object], known: bool) -> list[str]:
        """Sentences on what is not proven of an output. `codes`: how those of calibrated tensors
        were chosen; `known`: whether `error_weights` are."""
        return []

    def check(self, plan: Plan) -> None:
        """UsageError for a plan that it does not fit."""

    def notes(self, plan: Plan) -> list[str]:
        """What a user should know, for the plan."""
        return []

    def about(self) -> tuple[dict[str, Any], list[str]]:
        """Facts and lines about its inputs, for the plan and the report."""
        return {}, []

    def shared_memory(self, units: int) -> int:
        """Bytes that are kept while so many layers are under way."""
        return 0

    def worker_memory(self, plan: Plan) -> int:
        """Bytes of each worker beside its buffers."""
        return 0

    def buffers(self, plan: Plan) -> BufferSizes | None:
        """What its tasks need beside the buffers of packing."""
        return None

    def weights(self, layer: int) -> LayerWeights | NormWeights | None:
        """What squared errors of a layer's matrices count; None: all the same."""
        return None

    def tasks(self, expert: Expert, tasks: list[Task]) -> list[Task]:
        """The tasks of an expert, from those that earlier rows of the table gave it."""
        return tasks

    def more_tasks(self, expert: Expert) -> list[Task]:
        """What follows the expert's tasks, while the page cache has its bytes."""
        return []

    def convert(self, run: QuantizeCpu, pending: Sequence[Unit]) -> Sequence[Unit]:
        """Convert units that must be converted in an order of its own. Returns the others."""
        return pending

    def running(self) -> AbstractContextManager[object]:
        """Surrounds the threads of a run."""
        return nullcontext()

    def report(self) -> dict[str, Any]:
        """What a report of a run has in addition."""
        return {}
