"""What can be verified: each kind of output does every level in its own way."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from ktconv.checkpoint import TensorRef
from ktconv.packed.weights import Geometry
from ktconv.reading.buffers import BufferSizes
from ktconv.reading.reader import SourceReader
from ktconv.system.text import Notify, silent
from ktconv.verify import hidden_states
from ktconv.verify.copies import OTHER, CopyCheck
from ktconv.verify.findings import Facts, Findings
from ktconv.verify.layers import LayersCheck
from ktconv.verify.memory import (
    Budget,
    Need,
    capture_bytes,
    layers_need,
    level_model_bytes,
    plan_memory,
)
from ktconv.verify.model import ModelCheck
from ktconv.verify.output import OpenedOutput
from ktconv.verify.reading import Context
from ktconv.verify.request import VerifyRequest
from ktconv.verify.runner import Check
from ktconv.verify.totals import ItemResult, Totals

LEVELS_WITH_MODEL_CODE = ("layers", "model")


class OutputVerifier(ABC):
    """All levels on one opened output; a class for each kind."""

    output: OpenedOutput
    models_loaded: int  # at once, by level model

    def __init__(self, request: VerifyRequest, level: str) -> None:
        self.request, self.level, self.findings = request, level, Findings()

    # ---- before anything is read ----

    def check_request(self) -> None:
        """KtconvError for what cannot be run: now, not after an hour of reading."""
        self.check_options()
        if self.level in LEVELS_WITH_MODEL_CODE:
            hidden_states.check_source(self.output)
        if self.level == "model":
            self.model_check(silent).check_request()

    @abstractmethod
    def check_options(self) -> None:
        """UsageError for options that are about another kind of output."""

    @abstractmethod
    def check_structure(self) -> Facts: ...

    @abstractmethod
    def check_more(self) -> dict[str, Facts | None]:
        """Facts by name that only this kind has, from headers alone; None: not asked for."""

    def budget(self) -> Budget:
        """What is done at once, up to the level."""
        need, why_not = Need(self.thread_bytes()), None
        if self.level in LEVELS_WITH_MODEL_CODE:
            source, top_k = self.output.source, hidden_states.experts_per_token(self.output)
            layers = self.output.source_layers.values()
            model = level_model_bytes(source, self.models_loaded) if self.level == "model" else None
            need = Need(
                need.thread,
                layers_need(layers, self.geometries(), self.request, top_k),
                capture_bytes(source),
                model,
            )
            why_not = hidden_states.why_not_captured(self.output)
        return plan_memory(need, self.request.max_memory, self.request.threads, why_not)

    @abstractmethod
    def thread_bytes(self) -> int:
        """Of a thread that reads and compares."""

    def geometries(self) -> Iterable[Geometry]:
        """Of the layers that our kernels run."""
        return ()

    # ---- levels structure and weights ----

    @abstractmethod
    def buffer_sizes(self) -> BufferSizes:
        """What a worker needs to read any matrix of the source."""

    def checks(self) -> Sequence[Check[ItemResult]]:
        """What to read, in the order of the output; a sample of it if that was asked for. A
        sample has at least one expert of every layer."""
        source, reader = self.output.checkpoint, None
        if source is not None:
            reader = SourceReader(source.files, source.sources)
        compare = reader is not None and self.level != "structure"
        context = Context(self.findings, self.output.records, reader, compare)
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
        """Of a tensor of no expert."""
        yield CopyCheck(context, OTHER, tensor, origin)

    @abstractmethod
    def weights_facts(self, totals: Totals) -> Facts: ...

    # ---- levels layers and model ----

    @abstractmethod
    def layers_check(self, budget: Budget, notify: Notify) -> LayersCheck: ...

    @abstractmethod
    def model_check(self, notify: Notify) -> ModelCheck: ...
