"""What a conversion will write: every file, tensor and byte, from headers and options.

Nothing is read or written here. Dry run, disk check, ETA, streaming writes, resume and
index all follow from one `Plan`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from ktconv import __version__
from ktconv.checkpoint import PROJECTIONS, Checkpoint, MoELayer, Projection, TensorRef
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import (
    FORMATS,
    Format,
    kt_path,
    packed_shape,
    parse_tensor_name,
    tensor_name,
)
from ktconv.renaming import rename_tensors
from ktconv.units import format_ranges, format_size
from ktconv.writer.shards import Shard, Tensor, group, plan_shard

Layout = Literal["safetensors", "layers"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options that decide which bytes are written; a resumed run must have the same."""

    method: str = "int4"
    numa: int = 1
    layout: Layout = "safetensors"
    scale: Literal["amax"] = "amax"
    compat: bool = False
    mtp: bool = True
    experts_only: bool = False
    max_shard_size: int = 5_000_000_000

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of commit: the shards of a layer, or one shard of other tensors.

    For `--layout layers` the unit is a folder and has no shards.
    """

    key: str  # "layer-00003", "other-00001"
    options: Options
    layer: MoELayer | None = None
    copies: Sequence[tuple[TensorRef, str]] = ()  # source tensor, output name
    shard_counts: Sequence[tuple[str, int]] = ()  # file name, number of tensors
    folder: str | None = None
    source_bytes: int = 0
    output_bytes: int = 0
    data_bytes: int = 0  # of output_bytes, tensors

    @property
    def shard_names(self) -> list[str]:
        return [name for name, _ in self.shard_counts]

    @property
    def shards(self) -> list[Shard]:
        """Headers and offsets. Drawn anew at each call: for all layers at once they would
        take more time and memory than everything else in a plan."""
        tensors = self.tensors()
        return [
            plan_shard(name, list(islice(tensors, count)), metadata(self.options))
            for name, count in self.shard_counts
        ]

    def tensors(self) -> Iterator[Tensor]:
        """What is written, shard after shard."""
        if self.layer is not None:
            yield from expert_tensors(self.layer, self.options)
        for tensor, name in self.copies:
            yield Tensor(name, tensor.dtype, tensor.shape, tensor.nbytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole conversion. `layers` are all that the output will hold, whoever converts them."""

    checkpoint: Checkpoint
    options: Options
    layers: Sequence[Unit]
    others: Sequence[Unit]
    sidecars: Sequence[Path]  # files copied as they are
    notes: Sequence[str]
    skipped: Sequence[str] = field(default_factory=tuple)  # what is left out, and why

    @property
    def format(self) -> Format:
        return FORMATS[self.options.method]

    @property
    def units(self) -> list[Unit]:
        return [*self.layers, *self.others]

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

    def layer_units(self, indices: Sequence[int] | None) -> list[Unit]:
        """The units of these layers (all for None). UsageError for a layer that is not there."""
        if indices is None:
            return list(self.layers)
        present = {unit.layer.index: unit for unit in self.layers if unit.layer}
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


def make_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan the conversion of `checkpoint`; refuses what the format cannot hold."""
    layers, skipped_layers = _select_layers(checkpoint, options)
    check_dimensions(layers, options)
    others, skipped_tensors = _select_others(checkpoint, options)
    layer_sizes = _LayerSizes(options)
    copy_groups = _group_copies(others, options)
    numbers = _Numbering(sum(len(layer_sizes.of(layer)) for layer in layers) + len(copy_groups))
    return Plan(
        checkpoint=checkpoint,
        options=options,
        layers=[_layer_unit(layer, layer_sizes.of(layer), options, numbers) for layer in layers],
        others=[
            _copy_unit(index, tensors, options, numbers)
            for index, tensors in enumerate(copy_groups, start=1)
        ],
        sidecars=find_sidecars(checkpoint.path),
        notes=checkpoint.notes,
        skipped=[*skipped_layers, *skipped_tensors],
    )


def check_dimensions(layers: Sequence[MoELayer], options: Options) -> None:
    """Refuse dimensions and NUMA counts that the format cannot hold."""
    fmt = FORMATS[options.method]
    for layer in layers:
        hidden, intermediate = layer.hidden_size, layer.intermediate_size
        reason = fmt.check(hidden, intermediate, options.numa)
        if reason is None:
            continue
        if allowed := fmt.allowed_parts(hidden, intermediate):
            numbers = ", ".join(map(str, allowed))
            raise UsageError(
                f"{fmt.name} cannot split layer {layer.index} into --numa {options.numa}: {reason}",
                f"for this model --numa can be {numbers}",
            )
        others = [f.key for f in FORMATS.values() if f.allowed_parts(hidden, intermediate)]
        raise CheckpointError(
            f"{fmt.name} cannot hold layer {layer.index}: {fmt.check(hidden, intermediate, 1)}",
            f"--method {others[0]} can" if others else "no method of ktconv can hold it",
        )


def metadata(options: Options) -> dict[str, str]:
    """The `__metadata__` of every shard."""
    return {
        "format": "pt",
        "ktconv_version": __version__,
        "ktconv_method": FORMATS[options.method].name,
        "ktconv_numa": str(options.numa),
    }


def expert_tensors(layer: MoELayer, options: Options) -> Iterator[Tensor]:
    """All tensors of a layer, part by part, so that a NUMA node's share lies together."""
    fmt = FORMATS[options.method]
    shapes = {
        proj: packed_shape(proj, layer.hidden_size, layer.intermediate_size, options.numa)
        for proj in PROJECTIONS
    }
    for part in range(options.numa):
        for expert in range(len(layer.experts)):
            for proj, (rows, cols) in shapes.items():
                nbytes = fmt.weight_nbytes(rows, cols)
                name = tensor_name(layer.index, proj, expert, part, "weight")
                yield Tensor(name, "I8", (nbytes,), nbytes)
                name = tensor_name(layer.index, proj, expert, part, "scale")
                yield Tensor(name, "F32", (rows,), fmt.scale_nbytes(rows))


def matrix_source_bytes(layer: MoELayer, expert: int, proj: Projection) -> int:
    """Bytes that one projection of one expert takes in the source, scales included."""
    matrix = layer.experts[expert][proj]
    size = matrix.tensor.nbytes // max(1, _elements(matrix.tensor.shape))
    total = matrix.rows * matrix.cols * size
    if matrix.scale is not None:
        scale = matrix.scale
        grid = -(-matrix.rows // scale.block_rows) * -(-matrix.cols // scale.block_cols)
        total += grid * (scale.tensor.nbytes // max(1, _elements(scale.tensor.shape)))
    return total


def kt_files(layer: MoELayer, options: Options) -> dict[str, tuple[str, int]]:
    """Tensor name -> path and size of its file, for `--layout layers`."""
    method = FORMATS[options.method].name
    files = {}
    for tensor in expert_tensors(layer, options):
        name = parse_tensor_name(tensor.name)
        assert name is not None  # just built
        path = kt_path(
            method, name.layer, name.proj, name.expert, name.part, name.kind, tensor.nbytes
        )
        files[tensor.name] = path, tensor.nbytes
    return files


class _Numbering:
    """Shard names model-00001-of-00049.safetensors, in order."""

    def __init__(self, total: int) -> None:
        self._total, self._next = total, 1

    def take(self) -> str:
        name = f"model-{self._next:05d}-of-{self._total:05d}.safetensors"
        self._next += 1
        return name


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _select_layers(checkpoint: Checkpoint, options: Options) -> tuple[list[MoELayer], list[str]]:
    layers = [layer for layer in checkpoint.layers if options.mtp or not layer.is_mtp]
    if not layers:
        raise UsageError("--no-mtp leaves no MoE layer to convert", "run without --no-mtp")
    return layers, [
        f"MTP layer {layer.index}: --no-mtp"
        for layer in checkpoint.layers
        if layer.is_mtp and not options.mtp
    ]


class _LayerSizes:
    """Sizes of the shards of layers. Layers of equal dimensions whose numbers have equally
    many digits have headers of equal length, so that each such class is drawn once."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._known: dict[tuple[int, ...], list[_ShardSize]] = {}

    def of(self, layer: MoELayer) -> list[_ShardSize]:
        """By shard, in order; empty for `--layout layers`."""
        if self._options.layout == "layers":
            return []
        digits = len(str(layer.index))
        key = (digits, len(layer.experts), layer.hidden_size, layer.intermediate_size)
        if key not in self._known:
            self._known[key] = self._draw(layer)
        return self._known[key]

    def _draw(self, layer: MoELayer) -> list[_ShardSize]:
        sizes = []
        for tensors in group(expert_tensors(layer, self._options), self._options.max_shard_size):
            _check_fits(tensors, self._options)
            shard = plan_shard("", tensors, metadata(self._options))
            sizes.append(_ShardSize(len(tensors), shard.size, shard.data_bytes))
        return sizes


@dataclass(frozen=True, slots=True)
class _ShardSize:
    """What the plan keeps of a shard."""

    tensors: int
    nbytes: int
    data_bytes: int


def _check_fits(tensors: Sequence[Tensor], options: Options) -> None:
    size = plan_shard("", tensors, metadata(options)).size if len(tensors) == 1 else 0
    if size > options.max_shard_size:
        raise UsageError(
            f"--max-shard-size {format_size(options.max_shard_size)} is too small for tensor "
            f"{tensors[0].name} of {format_size(tensors[0].nbytes)}",
            f"use at least --max-shard-size {size}",
        )


def _layer_unit(
    layer: MoELayer, sizes: Sequence[_ShardSize], options: Options, numbers: _Numbering
) -> Unit:
    folder = f"_layer_{layer.index}" if options.layout == "layers" else None
    data_bytes = sum(size.data_bytes for size in sizes)
    if folder:
        data_bytes = sum(tensor.nbytes for tensor in expert_tensors(layer, options))
    return Unit(
        f"layer-{layer.index:05d}",
        options,
        layer=layer,
        shard_counts=[(numbers.take(), size.tensors) for size in sizes],
        folder=folder,
        source_bytes=_layer_source_bytes(layer),
        output_bytes=data_bytes if folder else sum(size.nbytes for size in sizes),
        data_bytes=data_bytes,
    )


def _layer_source_bytes(layer: MoELayer) -> int:
    """Bytes of all experts in the source; they have equal shapes and encodings."""
    expert = sum(matrix_source_bytes(layer, 0, proj) for proj in PROJECTIONS)
    return expert * len(layer.experts)


def _select_others(
    checkpoint: Checkpoint, options: Options
) -> tuple[list[tuple[TensorRef, str]], list[str]]:
    """Non-expert tensors with their output names, and why some are left out."""
    tensors = list(checkpoint.other_tensors)
    skipped = []
    if options.layout == "layers" or options.experts_only:
        size = sum(tensor.nbytes for tensor in tensors)
        why = "--experts-only" if options.experts_only else "--layout layers holds experts only"
        if tensors:
            skipped.append(f"{len(tensors)} non-expert tensors ({format_size(size)}): {why}")
        return [], skipped
    if not options.mtp:
        prefixes = tuple(_mtp_prefix(layer) for layer in checkpoint.layers if layer.is_mtp)
        kept = [tensor for tensor in tensors if not tensor.name.startswith(prefixes)]
        if len(kept) < len(tensors):
            skipped.append(f"{len(tensors) - len(kept)} other tensors of MTP layers: --no-mtp")
        tensors = kept
    return rename_tensors(tensors), skipped


def _mtp_prefix(layer: MoELayer) -> str:
    """What the names of all tensors of an MTP layer (or MTP stack) start with."""
    match = re.match(r"(?:.*?\.)?mtp\.|.*?layers\.[0-9]+\.", layer.source)
    return match[0] if match else layer.source


def _group_copies(
    others: Sequence[tuple[TensorRef, str]], options: Options
) -> list[list[tuple[TensorRef, str]]]:
    """Non-expert tensors by shard."""
    tensors = [Tensor(name, ref.dtype, ref.shape, ref.nbytes) for ref, name in others]
    remaining = iter(others)
    groups = []
    for tensors_of_shard in group(tensors, options.max_shard_size):
        _check_fits(tensors_of_shard, options)
        groups.append(list(islice(remaining, len(tensors_of_shard))))
    return groups


def _copy_unit(
    index: int,
    copies: Sequence[tuple[TensorRef, str]],
    options: Options,
    numbers: _Numbering,
) -> Unit:
    counts = [(numbers.take(), len(copies))]
    unit = Unit(f"other-{index:05d}", options, copies=copies, shard_counts=counts)
    (shard,) = unit.shards
    return replace(
        unit,
        source_bytes=shard.data_bytes,
        output_bytes=shard.size,
        data_bytes=shard.data_bytes,
    )


SIDECAR_PATTERNS = (
    "*.json",
    "*.jinja",
    "vocab*.txt",
    "merges*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "additional_chat_templates/*.jinja",
)
OWN_FILES = ("ktconv.json", "README.md", "model.safetensors.index.json")


def find_sidecars(directory: Path) -> list[Path]:
    """Config, tokenizer, chat-template and code files, relative to `directory`."""
    found = {
        path.relative_to(directory)
        for pattern in SIDECAR_PATTERNS
        for path in directory.glob(pattern)
        if path.is_file()
    }
    return sorted(
        path
        for path in found
        if path.name not in OWN_FILES and not path.name.endswith(".index.json")
    )
