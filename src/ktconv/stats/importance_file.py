"""Interface of every file of mean squares of experts' inputs, whoever wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.source import Projection
from ktconv.stats.origin import Origin, Sizes
from ktconv.system.arrays import F32, I64


class LayerImportance(Struct, frozen=True):
    """Mean squares of one layer: gate_up [E, H], down [E, I], and counts [E] of tokens. Experts
    without tokens have zeros."""

    gate_up: F32
    down: F32
    counts: I64

    def of(self, projection: Projection) -> F32:
        """[E, inputs of this projection]."""
        return self.down if projection == "down" else self.gate_up


class ImportanceFile(ABC):
    """An opened file, whose header is valid; values are read and checked by layer."""

    kind: str  # the format, as manifests record it
    path: Path
    origin: Origin | None  # None: the file does not tell
    sizes: Mapping[int, Sizes]  # by layer, ascending

    @abstractmethod
    def layer(self, index: int) -> LayerImportance:
        """One of `sizes`. Raises UsageError for values that cannot be mean squares, ResourceError
        where the system refuses to read."""

    @abstractmethod
    def damaged(self, why: str) -> UsageError:
        """The error for this file."""

    def check_values(self, name: str, values: F32, counts: I64) -> None:
        """UsageError unless `values` [E, channels] can be sums or means of squares."""
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise self.damaged(f"tensor {name} has values that are negative or not finite")
        if values[counts == 0].any():
            raise self.damaged(f"tensor {name} has values of experts without tokens")
