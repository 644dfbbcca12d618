"""The levels of verification on one output; a subclass for CPU and for GPU experts."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.source import ModelSource, NamingMap, TensorRef
from ktconv.source.adapter.recorded import names_of
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.system.text import Notify
from ktconv.verify import hidden_states
from ktconv.verify.findings import Facts, Findings, Progression
from ktconv.verify.kept_check import KeptCheck
from ktconv.verify.layers import LayersCheck
from ktconv.verify.memory import (
    Budget,
    LayerNeed,
    Need,
    capture_bytes,
    layers_need,
    plan_memory,
)
from ktconv.verify.model import ModelLevel
from ktconv.verify.output import OpenedOutput
from ktconv.verify.reading import Context, CopyCheck
from ktconv.verify.request import VerifyRequest
from ktconv.verify.runner import OTHER, Check
from ktconv.verify.second_reader import SecondReader
from ktconv.verify.structure import StructureCheck
from ktconv.verify.totals import ItemResult, Totals
from ktconv.writer.manifest import MANIFEST, read_begun

LEVELS_WITH_MODEL_CODE = ("layers", "model")


class OutputVerifier(ABC):
    """Runs every level on one opened output."""

    output: OpenedOutput
    budget: Budget
    checks: Sequence[Check[ItemResult]]  # what to read
    structure: Facts  # what level structure found in headers
    more: Facts  # sections of the report that only this kind has; None: not requested
    structure_class: ClassVar[type[StructureCheck]]
    layers_class: ClassVar[type[LayersCheck] | None] = None  # None: nothing is computed
    model_class: ClassVar[type[ModelLevel]]

    def __init__(self, request: VerifyRequest, level: str) -> None:
        self.request, self.level, self.findings = request, level, Findings()
        self.model: ModelLevel | None = None  # at level model
        source = request.original
        if source is not None:
            self._begun = read_begun(request.output)
            source = replace(source, map=self._naming(source), tower=self._tower(source))
            source = replace(source, adapter=self._adapters(source), prune=self._pruning(source))
        self.output = self.open(request.output, source)

    def _tower(self, source: ModelSource) -> str | None:
        """The tower of the source that the output records, else that of the option."""
        recorded, given = self._begun.tower, source.tower
        if recorded and given and given != recorded:
            raise UsageError(
                f"{self.request.output} contains the experts of the tower {recorded}, not {given}",
                "leave out --tower",
            )
        return recorded or given

    def _adapters(self, source: ModelSource) -> tuple[str, ...] | None:
        """The adapters of the source: those of the option, or else those that the output names,
        where they are found."""
        found = self._begun.located_adapters(source)
        if found and source.adapter is None:
            self.findings.note(
                f"adapters are those that {MANIFEST} names: {', '.join(names_of(found))}"
            )
        return found

    def _pruning(self, source: ModelSource) -> Mapping[str, Any] | Path | None:
        """The experts that stay: those that the output records, else those of the option."""
        recorded = self._begun.pruning
        if recorded is None:
            return source.prune
        given = source.pruning()
        if given is not None and given.record() != recorded.record():
            raise UsageError(
                f"--prune names other experts than {MANIFEST} of {self.request.output}",
                "leave out --prune",
            )
        return recorded.record()

    def _naming(self, source: ModelSource) -> NamingMap | None:
        """The map of the source's names: the option, or else what the output records."""
        recorded = self._begun.naming
        if source.map is None:
            if recorded is not None:
                self.findings.note(f"names of the source are by the map in {MANIFEST}")
            return recorded
        given = source.naming()
        if recorded is not None and given is not None and recorded.sha256 != given.sha256:
            self.findings.note(f"--map is another map than the one in {MANIFEST}")
        return given

    @staticmethod
    @abstractmethod
    def open(output: Path, source: ModelSource | None) -> OpenedOutput:
        """Raises UsageError if there is nothing to verify, CheckpointError for what cannot be."""

    # ---- before anything is read ----

    def prepare(self) -> None:
        """Runs level structure on headers. Raises KtconvError for what cannot be run."""
        self.check_options()
        if self.level in LEVELS_WITH_MODEL_CODE:
            self.check_source()
        if self.level == "model":
            self.model = self.model_class(self.output, self.request, self.findings)
            self.model.prepare()
        self.more = self.check_more()
        self.structure = self.structure_class(self.output, self.findings).run()
        self.budget = self._budget()
        self.checks = self._checks()

    def check_source(self) -> None:
        """Raises KtconvError for a source that the levels with model code cannot be run on."""
        hidden_states.check_source(self.output)

    @abstractmethod
    def check_options(self) -> None:
        """Raises UsageError for options that apply to another kind of output."""

    def refuse_packed_options(self, kind: str) -> None:
        """UsageError for options that are for other outputs than this one, which has `kind`."""
        request = self.request
        given = {
            "tp": request.tp,
            "ep": request.ep,
            "importance": request.importance,
            "calibrate": request.calibrate,
            "gradients": request.gradients,
            "with": request.beside,
        }
        for option in (name for name, value in given.items() if value):
            raise UsageError(
                f"--{option} does not apply to {self.output.directory}, which has {kind}",
                "omit it",
            )

    def check_more(self) -> Facts:
        """`more`, from headers."""
        return {}

    def _budget(self) -> Budget:
        """Threads and memory for all levels up to the requested one."""
        thread, shared, why_not = self.thread_bytes(), self.shared_bytes(), None
        if (checkpoint := self.output.checkpoint) is not None:
            thread += checkpoint.thread_memory
            shared += checkpoint.shared_memory
        need = Need(thread, shared=shared)
        if self.level in LEVELS_WITH_MODEL_CODE and self.layers_class is not None:
            source, top_k = self.output.source, hidden_states.experts_per_token(self.output)
            need = Need(
                need.thread,
                self.layers_need(top_k),
                capture_bytes(source),
                need.shared,
            )
            why_not = hidden_states.why_not_captured(self.output)
        budget = plan_memory(need, self.request.max_memory, self.request.threads, why_not)
        peak = self.model.memory if self.model else 0
        return replace(budget, peak=max(budget.peak, peak))

    def layers_need(self, top_k: int) -> LayerNeed:
        """Memory of level layers, whose tokens have up to `top_k` experts."""
        layers, packed = self.output.source_layers.values(), self.output.packed.layers.values()
        return layers_need(layers, packed, self.request, top_k)

    def thread_bytes(self) -> int:
        """Memory of a thread that reads and compares."""
        return self.buffer_sizes().nbytes

    def shared_bytes(self) -> int:
        """Memory of what all threads use."""
        return 0

    # ---- levels structure and weights ----

    def buffer_sizes(self) -> BufferSizes:
        """Buffers that a worker needs to read any matrix of the source."""
        return BufferSizes()

    def _checks(self) -> Sequence[Check[ItemResult]]:
        """Checks of what is read, in the order of the output; with --sample a part of it, which has
        at least one expert of every layer."""
        source, reader, second = self.output.checkpoint, SourceReader([], []), None
        if source is not None:
            reader = SourceReader(source.files, source.sources)
            second = SecondReader(source, reader) if self.level != "structure" else None
        context = Context(self.findings, self.output.records, reader, second)
        share, rng = self.request.sample, random.Random(self.request.seed)
        checks = list(self.expert_checks(context, share, rng))
        origins = self.output.source_tensors
        for name, tensor in self.output.others.items():
            if share >= 1 or rng.random() < share:
                checks += self.copy_checks(context, tensor, origins.get(name))
        return checks

    @abstractmethod
    def expert_checks(
        self, context: Context, share: float, rng: random.Random
    ) -> Iterator[Check[ItemResult]]: ...

    def copy_checks(
        self, context: Context, tensor: TensorRef, origin: TensorRef | None
    ) -> Iterator[Check[ItemResult]]:
        """Checks of a non-expert tensor."""
        second = context.second
        if second is not None and origin is not None and second.is_cut(origin):
            yield KeptCheck(context, OTHER, tensor, second.kept_origin(origin.name, tensor.shape))
            return
        yield CopyCheck(context, OTHER, tensor, origin)

    @abstractmethod
    def weights_facts(self, totals: Totals) -> Facts | None: ...

    # ---- levels layers and model ----

    def run_layers(self, progression: Progression, notify: Notify) -> Facts | None:
        """Facts of level layers; None where nothing is computed."""
        if self.layers_class is None:
            return None
        return self.layers_class(self, notify).run(progression)
