"""Ways to choose codes: one object each, over which `run` and the proofs of `verify` loop.

A way is a rule for scales, or an option of quantize-cpu that changes the plan, the tasks of an
expert, or what memory a run takes. A new one is a subclass of `Way` in a file of its own, and a row
in the table of `quantize/ways.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from ktconv.conversion.pipeline import Task
from ktconv.quantize.ways import WAYS, WayRow
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer, Projection
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system.arrays import F32
from ktconv.targets.packed.target import Options, Plan

if TYPE_CHECKING:
    from ktconv.conversion.plan import Unit
    from ktconv.quantize.packed.importance.load import LayerWeights
    from ktconv.quantize.packed.importance.source_weights import NormWeights
    from ktconv.quantize.packed.run import QuantizeCpu, Request
else:
    LayerWeights = NormWeights = Request = Any  # help() evaluates annotations


class Asked(Struct, frozen=True):
    """A request for a conversion with its opened checkpoint, before it is planned."""

    request: Request
    checkpoint: Checkpoint
    options: Options

    @property
    def layers(self) -> Sequence[MoELayer]:
        """The layers of the model that are converted."""
        return self.checkpoint.converted(self.options.mtp)

    def names(self, option: str) -> bool:
        """Whether the request, or a record of an output that is made again, has a value of it."""
        places = (self.request, self.options)
        values = [
            value for one in places for value in (getattr(one, option, None), one.ways.get(option))
        ]
        return any(value not in (None, False, "") for value in values)


class Expert(Struct, frozen=True):
    """An expert whose matrices become tasks."""

    reader: SourceReader
    layer: MoELayer
    number: int
    verify: bool
    options: Options
    weights: LayerWeights | NormWeights | None  # of squared errors; None: all count the same

    @property
    def matrices(self) -> Mapping[Projection, ExpertMatrix]:
        return self.layer.experts[self.number]


LAYERS_KEPT = 2  # with weights in memory, while verify reads an output


class ErrorWeights(Struct, frozen=True):
    """Weights of squared errors: [inputs] of each matrix, None if all count the same; and the bytes
    of memory that they take."""

    of: Callable[[int, int, Projection], F32 | None]  # layer, expert, projection
    memory: int


class Converted(Struct, frozen=True):
    """An output whose matrices are to be proven, with its source."""

    directory: Path
    options: Options
    checkpoint: Checkpoint
    layers: Sequence[MoELayer]


def ways_of_table(asked: Asked | None = None) -> tuple[type[Way], ...]:
    """The classes of the rows, in the table's order. With `asked` those that it may open: the
    modules of others stay unloaded."""
    wanted = [row for row in WAYS if not (row.option and asked) or asked.names(row.option)]
    return tuple(map(_class_of, wanted))


def _class_of(row: WayRow) -> type[Way]:
    module, name = row.place.split(":")
    way: type[Way] = getattr(import_module(f"ktconv.quantize.packed.{module}"), name)
    way.option = row.option
    return way


class Way(ABC):
    """One way, as a conversion uses it. Methods that a subclass leaves out change nothing."""

    option: ClassVar[str] = ""  # of its row; that of verify's with the file that proofs need

    # What the manifest records of it: fields of Options that are its own, or else `facts`.
    record: Mapping[str, Any] = MappingProxyType({})
    facts: Any = None  # a JSON value, under the name of its option

    @staticmethod
    @abstractmethod
    def open(asked: Asked) -> Way | None:
        """Open the way for a conversion; None if it is not asked for. UsageError for what it cannot
        be combined with, and for inputs that cannot be used."""

    @staticmethod
    def error_weights(output: Converted, given: Path | None) -> ErrorWeights | None:
        """The weights of the errors that an output's search for scales minimized, by its source and
        the file that is given; None: there are none, or they are not known. UsageError for another
        file than the conversion was given."""
        return None

    @staticmethod
    def unproven(options: Options, codes: Sequence[object], known: bool) -> list[str]:
        """Sentences on what is not proven of an output. `codes`: how those of calibrated tensors
        were chosen; `known`: whether `error_weights` are."""
        return []

    def check(self, plan: Plan) -> None:
        """UsageError for a plan that it does not fit."""
        return

    def notes(self, plan: Plan) -> list[str]:
        """Sentences for the user, shown with the plan."""
        return []

    def about(self) -> tuple[dict[str, Any], list[str]]:
        """Facts and lines about its inputs, for the plan and the report."""
        return {}, []

    def shared_memory(self, units: int) -> int:
        """Bytes that are kept while `units` are converted."""
        return 0

    def passing_bytes(self, units: Sequence[Unit]) -> int:
        """Bytes of files that are there while `units` are converted, and not behind it."""
        return 0

    def worker_memory(self, plan: Plan) -> int:
        """Bytes of each worker besides its buffers."""
        return 0

    def buffers(self, plan: Plan) -> BufferSizes | None:
        """Sizes of the buffers that its tasks need, in addition to those of packing."""
        return None

    def weights(self, layer: int) -> LayerWeights | NormWeights | None:
        """The weights of squared errors in a layer; None: all errors count the same."""
        return None

    def tasks(self, expert: Expert, tasks: list[Task]) -> list[Task]:
        """The tasks of an expert, from those that earlier rows of the table gave it."""
        return tasks

    def more_tasks(self, expert: Expert) -> list[Task]:
        """Tasks to run after those of the expert, while the page cache has its bytes."""
        return []

    def convert(self, run: QuantizeCpu, pending: Sequence[Unit]) -> Sequence[Unit]:
        """Convert units that must be converted in an order of its own. Returns the others."""
        return pending

    def running(self) -> AbstractContextManager[object]:
        """Surrounds the threads of a run."""
        return nullcontext()

    def report(self) -> dict[str, Any]:
        """Facts that it adds to the report of a run."""
        return {}
