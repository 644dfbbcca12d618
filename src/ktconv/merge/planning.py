"""What will be written when packed weights become other shards: layer by layer, then the rest.

The same units, names and bytes as `plan.make_plan` gives, without a source checkpoint, and with
the backward matrices that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ktconv.checkpoint import Checkpoint, MoELayer, TensorRef
from ktconv.errors import UsageError
from ktconv.formats import BACKWARD, FORMATS, Matrix, packed_shape, tensor_name
from ktconv.plan import Options, Plan, Unit, check_dimensions, expert_tensors, metadata
from ktconv.units import format_size
from ktconv.writer.shards import Tensor, group, plan_shard

Copy = tuple[TensorRef, str]  # a tensor and its output name


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer that will be written."""

    layer: MoELayer
    backward: bool
    nbytes: int  # that are read for it


@dataclass(frozen=True, slots=True)
class PackedUnit(Unit):
    """The shards of a layer: forward ones, then those of the backward matrices if there are."""

    backward: bool = False

    def tensors(self) -> Iterator[Tensor]:
        assert self.layer is not None
        yield from expert_tensors(self.layer, self.options)
        if self.backward:
            yield from backward_tensors(self.layer, self.options)


@dataclass(frozen=True, slots=True)
class Content:
    """All that a plan is made of."""

    checkpoint: Checkpoint
    options: Options
    layers: Sequence[PackedLayer]
    copies: Sequence[Copy] = ()
    sidecars: Sequence[Path] = ()
    notes: Sequence[str] = ()
    skipped: Sequence[str] = ()


def backward_tensors(layer: MoELayer, options: Options) -> Iterator[Tensor]:
    """The backward matrices of a layer, in the order of the forward ones."""
    for part in range(options.numa):
        for expert in range(len(layer.experts)):
            for proj in BACKWARD:
                yield from _matrix(layer, proj, expert, part, options)


def _matrix(
    layer: MoELayer, proj: Matrix, expert: int, part: int, options: Options
) -> Iterator[Tensor]:
    fmt = FORMATS[options.method]
    rows, cols = packed_shape(proj, layer.hidden_size, layer.intermediate_size, options.numa)
    nbytes = fmt.weight_nbytes(rows, cols)
    name = tensor_name(layer.index, proj, expert, part, "weight")
    yield Tensor(name, "I8", (nbytes,), nbytes)
    name = tensor_name(layer.index, proj, expert, part, "scale")
    yield Tensor(name, "F32", (rows,), fmt.scale_nbytes(rows))


def plan_packed(content: Content) -> Plan:
    """Plan all shards; refuses dimensions that the format cannot hold."""
    options = content.options
    check_dimensions([packed.layer for packed in content.layers], options)
    sizes, copies = _Sizes(options), _group_copies(content.copies, options)
    total = sum(len(sizes.of(packed)) for packed in content.layers) + len(copies)
    names = (f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1))
    return Plan(
        checkpoint=content.checkpoint,
        options=options,
        layers=[_layer_unit(packed, sizes, names) for packed in content.layers],
        others=[
            _copy_unit(number, tensors, options, next(names))
            for number, tensors in enumerate(copies, start=1)
        ],
        sidecars=content.sidecars,
        notes=content.notes,
        skipped=content.skipped,
    )


@dataclass(frozen=True, slots=True)
class _Size:
    """Of one shard."""

    tensors: int
    nbytes: int
    data_bytes: int


class _Sizes:
    """Sizes of the shards of layers; layers whose headers are equally long are drawn once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._known: dict[tuple[object, ...], list[_Size]] = {}

    def of(self, packed: PackedLayer) -> list[_Size]:
        layer = packed.layer
        dimensions = (len(layer.experts), layer.hidden_size, layer.intermediate_size)
        key = (len(str(layer.index)), *dimensions, packed.backward)
        if key not in self._known:
            sizes = self._draw(expert_tensors(layer, self.options))
            if packed.backward:
                sizes += self._draw(backward_tensors(layer, self.options))
            self._known[key] = sizes
        return self._known[key]

    def _draw(self, tensors: Iterator[Tensor]) -> list[_Size]:
        return [self.size(of_shard) for of_shard in group(tensors, self.options.max_shard_size)]

    def size(self, tensors: Sequence[Tensor]) -> _Size:
        shard = plan_shard("", tensors, metadata(self.options))
        if len(tensors) == 1 and shard.size > self.options.max_shard_size:
            raise UsageError(
                f"--max-shard-size {format_size(self.options.max_shard_size)} is too small for "
                f"tensor {tensors[0].name} of {format_size(tensors[0].nbytes)}",
                f"use at least --max-shard-size {shard.size}",
            )
        return _Size(len(tensors), shard.size, shard.data_bytes)


def _layer_unit(packed: PackedLayer, sizes: _Sizes, names: Iterator[str]) -> PackedUnit:
    shards = sizes.of(packed)
    return PackedUnit(
        f"layer-{packed.layer.index:05d}",
        sizes.options,
        layer=packed.layer,
        shard_counts=[(next(names), shard.tensors) for shard in shards],
        source_bytes=packed.nbytes,
        output_bytes=sum(shard.nbytes for shard in shards),
        data_bytes=sum(shard.data_bytes for shard in shards),
        backward=packed.backward,
    )


def _group_copies(copies: Sequence[Copy], options: Options) -> list[list[Copy]]:
    """Other tensors by shard."""
    tensors = [Tensor(name, ref.dtype, ref.shape, ref.nbytes) for ref, name in copies]
    remaining, sizes = iter(copies), _Sizes(options)
    groups = group(tensors, options.max_shard_size)
    for tensors_of_shard in groups:
        sizes.size(tensors_of_shard)
    return [list(islice(remaining, len(tensors_of_shard))) for tensors_of_shard in groups]


def _copy_unit(number: int, copies: Sequence[Copy], options: Options, name: str) -> Unit:
    unit = Unit(f"other-{number:05d}", options, copies=copies, shard_counts=[(name, len(copies))])
    (shard,) = unit.shards
    return replace(
        unit,
        source_bytes=shard.data_bytes,
        output_bytes=shard.size,
        data_bytes=shard.data_bytes,
    )
