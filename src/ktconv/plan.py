"""What a conversion will write: every file, tensor and byte, from headers and options.

Nothing is read or written here. Dry run, disk check, ETA, streaming writes, resume and
index all follow from one `Plan`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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

    For `--layout layers` the unit is a folder, and `shards` is empty.
    """

    key: str  # "layer-00003", "other-00001"
    shards: Sequence[Shard] = ()
    layer: MoELayer | None = None
    copies: Sequence[tuple[TensorRef, str]] = ()  # source tensor, output name
    folder: str | None = None
    source_bytes: int = 0
    output_bytes: int = 0
    data_bytes: int = 0  # of output_bytes, tensors


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
    drafts = [_draft_layer(layer, options) for layer in layers]
    others, skipped_tensors = _select_others(checkpoint, options)
    copy_groups = _group_copies(others, options)
    numbers = _Numbering(sum(len(draft) for draft in drafts) + len(copy_groups))
    layer_units = [
        _layer_unit(layer, draft, options, numbers)
        for layer, draft in zip(layers, drafts, strict=True)
    ]
    sources = {name: tensor for tensor, name in others}
    return Plan(
        checkpoint=checkpoint,
        options=options,
        layers=layer_units,
        others=[
            _copy_unit(index, tensors, sources, options, numbers)
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
    left_out = [layer for layer in checkpoint.layers if layer not in layers]
    return layers, [f"MTP layer {layer.index}: --no-mtp" for layer in left_out]


def _draft_layer(layer: MoELayer, options: Options) -> list[list[Tensor]]:
    """The layer's tensors by shard; empty for `--layout layers`."""
    if options.layout == "layers":
        return []
    groups = group(expert_tensors(layer, options), options.max_shard_size)
    for tensors in groups:
        _check_fits(tensors, options)
    return groups


def _check_fits(tensors: Sequence[Tensor], options: Options) -> None:
    size = plan_shard("", tensors, metadata(options)).size if len(tensors) == 1 else 0
    if size > options.max_shard_size:
        raise UsageError(
            f"--max-shard-size {format_size(options.max_shard_size)} is too small for tensor "
            f"{tensors[0].name} of {format_size(tensors[0].nbytes)}",
            f"use at least --max-shard-size {size}",
        )


def _layer_unit(
    layer: MoELayer, draft: Sequence[Sequence[Tensor]], options: Options, numbers: _Numbering
) -> Unit:
    shards = [plan_shard(numbers.take(), tensors, metadata(options)) for tensors in draft]
    source = sum(
        matrix_source_bytes(layer, expert, proj)
        for expert in range(len(layer.experts))
        for proj in PROJECTIONS
    )
    key = f"layer-{layer.index:05d}"
    if options.layout == "layers":
        size = sum(size for _, size in kt_files(layer, options).values())
        folder = f"_layer_{layer.index}"
        return Unit(
            key,
            layer=layer,
            folder=folder,
            source_bytes=source,
            output_bytes=size,
            data_bytes=size,
        )
    return Unit(
        key,
        shards,
        layer,
        source_bytes=source,
        output_bytes=sum(shard.size for shard in shards),
        data_bytes=sum(shard.data_bytes for shard in shards),
    )


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


def _group_copies(others: Sequence[tuple[TensorRef, str]], options: Options) -> list[list[Tensor]]:
    tensors = (Tensor(name, ref.dtype, ref.shape, ref.nbytes) for ref, name in others)
    groups = group(tensors, options.max_shard_size)
    for tensors_of_shard in groups:
        _check_fits(tensors_of_shard, options)
    return groups


def _copy_unit(
    index: int,
    tensors: Sequence[Tensor],
    sources: Mapping[str, TensorRef],
    options: Options,
    numbers: _Numbering,
) -> Unit:
    shard = plan_shard(numbers.take(), tensors, metadata(options))
    return Unit(
        f"other-{index:05d}",
        [shard],
        copies=[(sources[tensor.name], tensor.name) for tensor in tensors],
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
