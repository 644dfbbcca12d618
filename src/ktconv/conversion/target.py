"""The interface of a target: what a conversion writes for experts, and where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ktconv.source import MoELayer, TensorRef
from ktconv.source.side_files import find_side_files
from ktconv.writer.shards import Shard, Tensor, plan_shard


class BaseOptions(Protocol):
    """Common to all records of the options that decide which bytes are written; a resumed run must
    have the same ones. Manifests keep the order of their fields."""

    @property
    def mtp(self) -> bool:
        """Whether layers for multi-token prediction are converted too."""

    @property
    def max_shard_size(self) -> int: ...

    def as_dict(self) -> dict[str, object]:
        """The options as run.json and the manifest record them."""


class Target(ABC):
    """Writing of the experts of a layer and of all other tensors."""

    made_files: Sequence[str] = ()  # names of files written beside shards, see Conversion
    has_index = True
    copies_gguf = False  # whether `rename` knows the names of tensors of GGUF files
    readings = 1  # of each expert's bytes in the source

    options: BaseOptions

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the format: AMXINT4, W4A16."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The format with the options that shape it, in a few words."""

    def serving(self) -> str | None:
        """Flags of sglang-kt that must agree with the output, whose path follows them; None where
        there are none."""
        return None

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Name and options of the format for the JSON of a run."""

    @abstractmethod
    def check(self, layers: Sequence[MoELayer]) -> None:
        """Raise UsageError for dimensions that the format cannot represent."""

    @abstractmethod
    def sections(self, layer: MoELayer, experts: Sequence[int]) -> Sequence[Iterator[Tensor]]:
        """All tensors of these experts, in the order of the file. Each section begins a shard."""

    def tensors(self, layer: MoELayer, experts: Sequence[int]) -> Iterator[Tensor]:
        """The tensors of all sections."""
        for section in self.sections(layer, experts):
            yield from section

    def slots(self, layer: MoELayer, experts: Sequence[int]) -> Mapping[str, tuple[str, int]]:
        """Parts of tensors that are written and recorded by themselves: the name of each, with the
        tensor that it is in and its first byte there. A tensor has none, or consists of them."""
        return {}

    def alike(self, layer: MoELayer) -> object:
        """Equal for layers of equal dimensions whose experts become the same tensors."""
        return None

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of every shard."""

    def left_out(self) -> str | None:
        """Reason why non-expert tensors are left out; None: they are copied."""
        return None

    def shard_name(self, number: int, count: int) -> str:
        """Name of shard `number` of `count`, from 1 on."""
        return f"model-{number:05d}-of-{count:05d}.safetensors"

    def plan_shard(self, name: str, tensors: Sequence[Tensor]) -> Shard:
        """Header and offsets of a shard with `tensors`. While sizes are asked for, `name` is
        empty."""
        return plan_shard(name, tensors, self.metadata())

    def begin(self, shards: int, tensors: int) -> int:
        """Take the numbers of shards and of all their tensors, once they are known. Returns bytes
        that the first shard has more than others, for which `plan_shard` was asked before."""
        return 0

    def rename(self, tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, str]]:
        """Non-expert tensors with their names in the output, which are those of the source."""
        return [(tensor, tensor.name) for tensor in tensors]

    def copied(self, tensor: TensorRef, name: str) -> Tensor:
        """A non-expert tensor as it is written: unchanged, unless the target decodes it."""
        return Tensor(name, tensor.dtype, tensor.shape, tensor.nbytes)

    def sidecars(self, directory: Path) -> list[Path]:
        """Files of the source that are copied as they are, relative to `directory`."""
        return find_side_files(directory)

    def folder(self, layer: MoELayer) -> str | None:
        """The folder that the layer's tensors go to, file by file; None: to shards."""
        return None

    def folder_files(
        self, layer: MoELayer, experts: Sequence[int]
    ) -> Mapping[str, tuple[str, int]]:
        """Tensor name -> path and size of its file, where there is a folder."""
        return {}
