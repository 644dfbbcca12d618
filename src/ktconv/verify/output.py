"""An output opened again: what lies on the disk, its manifest, and the plan it came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconv.checkpoint import Checkpoint, MoELayer, TensorRef
from ktconv.checkpoint.agreement import Dimensions
from ktconv.conversion.plan import Plan
from ktconv.packed.weights import PackedWeights
from ktconv.writer.journal import Journal, Record
from ktconv.writer.manifest import Manifest

NO_LIMIT = 1 << 62  # of shards: which of them holds what means nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedOutput(ABC):
    """What all kinds of outputs have. `plan` and `checkpoint` are None without a source."""

    packed: PackedWeights  # has all tensors of experts for GPUs among its others
    manifest: Manifest | None  # None: another tool's output, or an unusable one
    checkpoint: Checkpoint | None
    plan: Plan[Any] | None
    others: Mapping[str, TensorRef]  # of no expert

    @property
    def directory(self) -> Path:
        return self.packed.directory

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """How the output was made, for the report: method, and parts or groups."""

    @abstractmethod
    def experts_in(self, layer: int) -> Sequence[int]:
        """Ids of the experts of a layer that are there, or should be."""

    @property
    @abstractmethod
    def dimensions(self) -> Mapping[int, Dimensions]:
        """Dimensions of the layers by their tensors, to be compared with config.json."""

    @property
    def ours(self) -> bool:
        return self.manifest is not None

    @property
    def unfinished(self) -> bool:
        """Whether a conversion into it was begun; manifest, index and side files come last."""
        return Journal(self.directory).run_file.exists()

    @property
    def source(self) -> Checkpoint:
        """The checkpoint that was converted, which all levels above structure have."""
        assert self.checkpoint is not None
        return self.checkpoint

    @property
    def source_layers(self) -> dict[int, MoELayer]:
        """The layers of the source that should be there."""
        units = self.plan.layers if self.plan else ()
        return {unit.layer.index: unit.layer for unit in units}

    @property
    def source_tensors(self) -> dict[str, TensorRef]:
        """What other tensors were copied from, by their names here."""
        units = self.plan.others if self.plan else ()
        return {name: ref for unit in units for ref, name in unit.copies}

    @property
    def records(self) -> Mapping[str, Record]:
        """What the manifest says of each tensor; empty without one."""
        return self.manifest.tensors if self.manifest else {}
