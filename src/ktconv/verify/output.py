"""An opened output: its tensors on disk, its manifest, and the plan that it should match."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.conversion.plan import Plan
from ktconv.source import Checkpoint, MoELayer, TensorRef
from ktconv.source.agreement import Dimensions
from ktconv.system.abstract_record import AbstractRecord
from ktconv.targets.packed.weights import PackedWeights
from ktconv.writer.journal import Journal, Record
from ktconv.writer.manifest import Manifest

NO_LIMIT = 1 << 62  # of shard sizes: the shards of tensors are not compared


class OpenedOutput(AbstractRecord, frozen=True, kw_only=True):
    """Common to all kinds of outputs. `plan` and `checkpoint` are None without a source."""

    packed: PackedWeights  # `packed.others` contains experts for GPUs
    manifest: Manifest | None  # None: another tool's output, or an unusable one
    checkpoint: Checkpoint | None
    plan: Plan[Any] | None
    others: Mapping[str, TensorRef]  # non-expert tensors

    @property
    def directory(self) -> Path:
        return self.packed.directory

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Description for the report: method, and parts or groups."""

    @abstractmethod
    def experts_in(self, layer: int) -> Sequence[int]:
        """Ids of the experts of a layer that are, or should be, in the output."""

    @property
    def dimensions(self) -> Mapping[int, Dimensions]:
        """Dimensions of the layers by their tensors, to be compared with config.json."""
        return {}

    @property
    def has_config(self) -> bool:
        """Whether config.json belongs to it."""
        return True

    @property
    def ours(self) -> bool:
        return self.manifest is not None

    @property
    def unfinished(self) -> bool:
        """Whether a conversion into it is incomplete. Manifest and side files are written last."""
        return Journal(self.directory).has_run()

    @property
    def source(self) -> Checkpoint:
        """The checkpoint that was converted; levels above structure always have it."""
        assert self.checkpoint is not None
        return self.checkpoint

    @property
    def source_layers(self) -> dict[int, MoELayer]:
        """The layers of the source that should be in the output."""
        units = self.plan.layers if self.plan else ()
        return {unit.layer.index: unit.layer for unit in units}

    @property
    def is_partial(self) -> bool:
        """Whether experts of the source are missing on purpose."""
        layers = self.source_layers.items()
        return any(len(self.experts_in(index)) < len(layer.experts) for index, layer in layers)

    @property
    def source_tensors(self) -> dict[str, TensorRef]:
        """The source tensors of non-expert tensors, by their names in the output."""
        units = self.plan.others if self.plan else ()
        return {name: ref for unit in units for ref, name in unit.copies}

    @property
    def records(self) -> Mapping[str, Record]:
        """The manifest's record of each tensor; empty without a manifest."""
        return self.manifest.tensors if self.manifest else {}
