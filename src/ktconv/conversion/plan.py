"""Plans the output of a conversion: every file, tensor and byte, from headers and options.

Nothing is read or written here. Dry run, disk check, ETA, streaming writes, resume and
index all follow from one `Plan`; the `Target` defines what an expert becomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ktconv.conversion.target import Target
from ktconv.errors import UsageError
from ktconv.families.names import mtp_prefix
from ktconv.source import Checkpoint, MoELayer, TensorRef
from ktconv.source.reading.matrices import experts_bytes
from ktconv.system.collector import collector_paused
from ktconv.system.units import counted, format_ranges, format_size
from ktconv.writer.shards import Shard, Tensor, group

_GGUF_ONLY = "their names and types in GGUF files are not those of safetensors models"

T = TypeVar("T", bound=Target)
T_co = TypeVar("T_co", bound=Target, covariant=True)

Copy = tuple[TensorRef, str]  # a tensor of the source and its output name
Selection = Mapping[int, Sequence[int]]  # layer -> expert ids, ascending; other layers: all


class Unit(Struct, frozen=True):
    """One unit of commit: a shard of non-expert tensors, or a `LayerUnit`."""

    key: str  # "layer-00003", "other-00001"
    target: Target
    copies: Sequence[Copy] = ()
    shard_counts: Sequence[tuple[str, int]] = ()  # file name, number of tensors
    folder: str | None = None  # instead of shards, where the target writes folders
    source_bytes: int = 0
    output_bytes: int = 0
    data_bytes: int = 0  # of output_bytes, tensors

    @property
    def shard_names(self) -> list[str]:
        return [name for name, _ in self.shard_counts]

    @property
    def shards(self) -> list[Shard]:
        """Headers and offsets. Computed at each call: kept for all layers they would take more
        time and memory than everything else in a plan."""
        tensors = self.tensors()
        return [
            self.target.plan_shard(name, list(islice(tensors, count)))
            for name, count in self.shard_counts
        ]

    def tensors(self) -> Iterator[Tensor]:
        """Tensors in the order in which they are written, shard after shard."""
        return (self.target.copied(*copy) for copy in self.copies)

    @property
    def slots(self) -> Mapping[str, tuple[str, int]]:
        """Parts of tensors that are recorded by themselves, see `Target.slots`."""
        return {}

    @property
    def folder_files(self) -> Mapping[str, tuple[str, int]]:
        """Tensor name -> path and size of its file, where there is a folder."""
        return {}


class LayerUnit(Unit, frozen=True, kw_only=True):
    """The experts of one layer."""

    layer: MoELayer
    experts: Sequence[int]  # ids of those that are converted

    @property
    def omitted(self) -> int:
        """Number of experts of the layer that are not converted."""
        return len(self.layer.experts) - len(self.experts)

    def tensors(self) -> Iterator[Tensor]:
        return self.target.tensors(self.layer, self.experts)

    @property
    def slots(self) -> Mapping[str, tuple[str, int]]:
        return self.target.slots(self.layer, self.experts)

    @property
    def folder_files(self) -> Mapping[str, tuple[str, int]]:
        return self.target.folder_files(self.layer, self.experts)


class Plan(Struct, Generic[T_co], frozen=True):
    """A whole conversion. `layers` are all layers of the output, whichever run converts them."""

    checkpoint: Checkpoint
    target: T_co
    layers: Sequence[LayerUnit]
    others: Sequence[Unit]
    sidecars: Sequence[Path]  # files copied as they are
    notes: Sequence[str]
    skipped: Sequence[str] = ()  # what is left out, and why

    @property
    def units(self) -> list[Unit]:
        return [*self.layers, *self.others]

    @property
    def moe_layers(self) -> list[MoELayer]:
        return [unit.layer for unit in self.layers]

    @property
    def made_files(self) -> Sequence[str]:
        """Names of files that are made, not copied, next to shards."""
        return [*self.target.made_files, *self.checkpoint.made_files]

    @property
    def output_bytes(self) -> int:
        """Weights and headers; the index, manifest and sidecar files come on top."""
        return sum(unit.output_bytes for unit in self.units)

    @property
    def source_bytes(self) -> int:
        return sum(unit.source_bytes for unit in self.units)

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, what the index calls total_size."""
        return sum(unit.data_bytes for unit in self.units)

    def layer_units(self, indices: Sequence[int] | None) -> list[LayerUnit]:
        """The units of these layers (all for None). UsageError for a layer that does not exist."""
        if indices is None:
            return list(self.layers)
        present = {unit.layer.index: unit for unit in self.layers}
        if beyond := [index for index in indices if index > max(present)]:
            raise UsageError(
                f"--layers names layer {beyond[0]}, but the last MoE layer is {max(present)}",
                f"MoE layers are {format_ranges(list(present))}",
            )
        chosen = [present[index] for index in indices if index in present]
        if not chosen:
            raise UsageError(
                "--layers names no MoE layer", f"MoE layers are {format_ranges(list(present))}"
            )
        return chosen


class LayerContent(Struct, frozen=True):
    """The experts of one layer that will be written."""

    layer: MoELayer
    experts: Sequence[int]
    source_bytes: int  # that are read for them


@collector_paused()
def plan_checkpoint(
    checkpoint: Checkpoint, target: T, selection: Selection | None = None
) -> Plan[T]:
    """Plan the conversion of `checkpoint`; rejects what the target cannot represent."""
    layers, skipped_layers = _select_layers(checkpoint, target)
    copies, skipped_tensors = _select_others(checkpoint, target)
    return lay_out(
        checkpoint,
        target,
        [_layer_content(layer, (selection or {}).get(layer.index), target) for layer in layers],
        copies,
        _sidecars(checkpoint, target),
        checkpoint.notes,
        [*skipped_layers, *skipped_tensors],
    )


@collector_paused()
def lay_out(
    checkpoint: Checkpoint,
    target: T,
    layers: Sequence[LayerContent],
    copies: Sequence[Copy],
    sidecars: Sequence[Path],
    notes: Sequence[str],
    skipped: Sequence[str] = (),
) -> Plan[T]:
    """Give every tensor its shard."""
    target.check([chosen.layer for chosen in layers])
    sizes, remaining = _Sizes(target), iter(copies)
    copy_sizes = _shard_sizes((target.copied(*copy) for copy in copies), target)
    shards = [*(size for chosen in layers for size in sizes.of(chosen)), *copy_sizes]
    total = len(shards)
    more = target.begin(total, sum(size.tensors for size in shards))
    names = (target.shard_name(number, total) for number in range(1, total + 1))
    units = [_layer_unit(chosen, sizes.of(chosen), target, names) for chosen in layers]
    others = [
        _copy_unit(number, list(islice(remaining, size.tensors)), size, target, next(names))
        for number, size in enumerate(copy_sizes, start=1)
    ]
    if more:
        units[0] = replace(units[0], output_bytes=units[0].output_bytes + more)
    return Plan(checkpoint, target, units, others, sidecars, notes, skipped)


# ---- what is converted and copied ------------------------------------------------------


def _sidecars(checkpoint: Checkpoint, target: Target) -> list[Path]:
    """Files that are copied: those in whose place others are made are not."""
    if checkpoint.side_directory is None:
        return []
    found = target.sidecars(checkpoint.side_directory)
    return [path for path in found if str(path) not in checkpoint.made_files]


def _select_layers(checkpoint: Checkpoint, target: Target) -> tuple[list[MoELayer], list[str]]:
    layers = checkpoint.converted(target.options.mtp)
    if not layers:
        raise UsageError("--no-mtp leaves no MoE layer to convert", "omit --no-mtp")
    return layers, [
        f"MTP layer {layer.index}: --no-mtp"
        for layer in checkpoint.layers
        if layer.is_mtp and not target.options.mtp
    ]


def _layer_content(layer: MoELayer, chosen: Sequence[int] | None, target: Target) -> LayerContent:
    experts = range(len(layer.experts)) if chosen is None else chosen
    return LayerContent(layer, experts, target.readings * experts_bytes(layer, experts))


def _select_others(checkpoint: Checkpoint, target: Target) -> tuple[list[Copy], list[str]]:
    """Non-expert tensors with their output names, and why some are left out."""
    tensors = list(checkpoint.other_tensors)
    skipped = []
    unnamed = checkpoint.is_gguf and not target.copies_gguf
    if why := target.left_out() or (_GGUF_ONLY if unnamed else None):
        size = sum(tensor.nbytes for tensor in tensors)
        if tensors:
            skipped.append(f"{len(tensors)} non-expert tensors ({format_size(size)}): {why}")
        return [], skipped
    if not target.options.mtp:
        prefixes = tuple(_mtp_prefix(checkpoint, one) for one in checkpoint.layers if one.is_mtp)
        kept = [tensor for tensor in tensors if not tensor.name.startswith(prefixes)]
        if len(kept) < len(tensors):
            skipped.append(
                f"{counted(len(tensors) - len(kept), 'other tensor')} of MTP layers: --no-mtp"
            )
        tensors = kept
    return target.rename(tensors), skipped


def _mtp_prefix(checkpoint: Checkpoint, layer: MoELayer) -> str:
    mapped = checkpoint.mapped and checkpoint.mapped.prefix(layer.source)
    return mapped or mtp_prefix(layer.source)


# ---- shards ----------------------------------------------------------------------------


class _ShardSize(Struct, frozen=True):
    """Size of a shard, as the plan keeps it."""

    tensors: int
    nbytes: int
    data_bytes: int


class _Sizes:
    """Sizes of the shards of layers. Headers of layers with equal dimensions and encodings, whose
    numbers have equally many digits, have the same length: each such class is computed once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[tuple[object, ...], list[_ShardSize]] = {}

    def of(self, chosen: LayerContent) -> list[_ShardSize]:
        """Sizes by shard, in order; empty where the layer goes to a folder."""
        layer, experts = chosen.layer, chosen.experts
        if self._target.folder(layer) is not None:
            return []
        digits = len(str(layer.index)), len(layer.source)
        which = len(experts) if experts == range(len(layer.experts)) else tuple(experts)
        sections = self._target.sections(layer, experts)
        sizes = layer.hidden_size, layer.intermediate_size
        kind = layer.encoding, layer.biased, layer.gated, repr(self._target.alike(layer))
        key = (digits, which, len(sections), sizes, *kind)
        if key not in self._known:
            self._known[key] = [
                size for section in sections for size in _shard_sizes(section, self._target)
            ]
        return self._known[key]


def _shard_sizes(tensors: Iterable[Tensor], target: Target) -> list[_ShardSize]:
    """Sizes of the shards that these tensors fill, in order; refuses a tensor larger than a
    shard."""
    sizes, limit = [], target.options.max_shard_size
    for members in group(tensors, limit):
        shard = target.plan_shard("", members)
        if len(members) == 1 and shard.size > limit:
            raise UsageError(
                f"--max-shard-size {format_size(limit)} is too small for tensor "
                f"{members[0].name} of {format_size(members[0].nbytes)}",
                f"use at least --max-shard-size {shard.size}",
            )
        sizes.append(_ShardSize(len(members), shard.size, shard.data_bytes))
    return sizes


def _layer_unit(
    chosen: LayerContent, sizes: Sequence[_ShardSize], target: Target, names: Iterator[str]
) -> LayerUnit:
    layer, experts = chosen.layer, chosen.experts
    folder = target.folder(layer) if experts else None
    data_bytes = sum(size.data_bytes for size in sizes)
    if folder:
        data_bytes = sum(tensor.nbytes for tensor in target.tensors(layer, experts))
    return LayerUnit(
        f"layer-{layer.index:05d}",
        target,
        layer=layer,
        experts=experts,
        shard_counts=[(next(names), size.tensors) for size in sizes],
        folder=folder,
        source_bytes=chosen.source_bytes,
        output_bytes=data_bytes if folder else sum(size.nbytes for size in sizes),
        data_bytes=data_bytes,
    )


def _copy_unit(
    number: int, copies: Sequence[Copy], size: _ShardSize, target: Target, name: str
) -> Unit:
    return Unit(
        f"other-{number:05d}",
        target,
        copies=copies,
        shard_counts=[(name, size.tensors)],
        source_bytes=sum(tensor.nbytes for tensor, _ in copies),
        output_bytes=size.nbytes,
        data_bytes=size.data_bytes,
    )
