"""The request of `compare`: what to compare, and how thoroughly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.source.model_source import ModelSource
from ktconv.source.remote.urls import no_directory

LEVELS = ("weights", "layers", "model")


class CompareRequest(Struct, frozen=True):
    """Outputs and the model that they were converted from. Each is verified to `level`, and its
    experts are measured at these `tokens`."""

    outputs: Sequence[Path]
    source: ModelSource | str
    level: str | None = None  # None: model, or layers where torch is not installed
    sample: float = 1.0
    seed: int = 0
    threads: int | None = None
    max_memory: int | None = None
    text: Path | None = None
    windows: int = 40
    tokens: Sequence[int] = (1, 64)  # empty: speed is not measured
    seconds: float = 0.5  # for each measurement

    @property
    def depth(self) -> str:
        """The level."""
        if self.level is not None:
            return self.level
        installed = all(find_spec(name) is not None for name in ("torch", "transformers"))
        return "model" if installed else "layers"

    def check(self) -> None:
        """UsageError for what cannot be compared."""
        if len(self.outputs) < 2:
            raise UsageError("one output alone cannot be compared", "give several, or use verify")
        real = [os.path.realpath(path) for path in self.outputs]  # resolve() raises for circles
        places = list(zip(self.outputs, real, strict=True))
        if twice := next((path for path, place in places if real.count(place) > 1), None):
            raise UsageError(f"{twice} is given twice", "give it once")
        original = os.path.realpath(ModelSource.of(self.source).model)
        if same := next((path for path, place in places if place == original), None):
            raise UsageError(f"{same} is the source", "omit it: the source has a row of its own")
        if missing := next((path for path in self.outputs if not path.is_dir()), None):
            raise UsageError(no_directory(missing), "give outputs of ktconv")
