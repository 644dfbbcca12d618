"""Packed expert weights on a disk, of any tool: shards or layer folders.

    packed = open_packed(Path("qwen3-int4"))
    packed.layers[3].format, packed.layers[3].parts
    packed.map(TensorId(3, "gate", 0, 0, "weight"))     # uint8, mapped

Names and sizes only; the bytes of a tensor are read when somebody asks for them.
"""

from __future__ import annotations

import mmap
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from ktconv.errors import CheckpointError, KtconvError, ResourceError
from ktconv.formats import (
    KINDS,
    PROJECTIONS,
    UNGATED,
    Format,
    Kind,
    Matrix,
    Projection,
    TensorId,
    backward_of,
    is_backward,
    kinds_of,
    output_formats,
    packed_shape,
    parse_kt_path,
    parse_tensor_name,
    tensor_name,
)
from ktconv.source import Header, TensorRef, read_header
from ktconv.source.safetensors_file import header_mentions
from ktconv.system.arrays import U8
from ktconv.system.pointers import PointerError, refuse_pointer_at
from ktconv.system.regular_files import opened_regular
from ktconv.targets.expert_sets import EXCLUDED, ExpertSet, set_of_record
from ktconv.writer.journal import Journal
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest, read_run
from ktconv.writer.metadata import read_index

_LAYER_FOLDER = re.compile(r"_layer_[0-9]+")


class Geometry(Struct, frozen=True):
    """Geometry of one layer, as the sizes of most of its tensors say."""

    experts: int  # that its router chooses from
    parts: int
    hidden: int
    intermediate: int
    format: Format | None  # None: no known format has such sizes
    elsewhere: frozenset[int] = frozenset()  # of the experts, those that were left out on purpose
    biased: bool = False  # whether its matrices have biases
    gated: bool = True  # whether its experts have a gate

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The matrices of an expert."""
        return PROJECTIONS if self.gated else UNGATED

    def matrices(self, backward: bool) -> tuple[Matrix, ...]:
        """Matrices of an expert, those of the backward pass included if there are any."""
        return (*self.projections, *(backward_of(self.projections) if backward else ()))

    @property
    def here(self) -> Sequence[int]:
        """Ids of the experts that should be there."""
        if not self.elsewhere:
            return range(self.experts)
        return [expert for expert in range(self.experts) if expert not in self.elsewhere]

    def shape(self, proj: Matrix) -> tuple[int, int]:
        """Rows and columns of one part's matrix."""
        return packed_shape(proj, self.hidden, self.intermediate, self.parts)

    def stored(self, proj: Matrix, kind: Kind) -> tuple[str, tuple[int, ...], int] | None:
        """dtype, shape and bytes of a tensor in shards; None where the format is not known."""
        return self.format.stored(kind, *self.shape(proj)) if self.format else None

    def tensors(self, layer: int, matrices: Sequence[Matrix] | None = None) -> Iterator[TensorId]:
        """All that a layer of these dimensions consists of; None: its projections."""
        for expert in self.here:
            for part in range(self.parts):
                for proj in self.projections if matrices is None else matrices:
                    for kind in kinds_of(proj, part, self.biased):
                        yield TensorId(layer, proj, expert, part, kind)


class PackedWeights(Struct):
    """The packed tensors of a directory, and what is wrong with its files."""

    directory: Path
    layout: str = "safetensors"  # or "layers"
    # dtype and shape are empty for a `.kt` file
    tensors: dict[TensorId, TensorRef] = field(default_factory=dict)
    others: dict[str, TensorRef] = field(default_factory=dict)  # non-expert tensors of shards
    # Tensors of shards whose parts are in `others`, under the names of numbered experts' tensors.
    stacked: dict[str, TensorRef] = field(default_factory=dict)
    slots: frozenset[str] = frozenset()  # the names of these parts
    headers: dict[str, Header] = field(default_factory=dict)  # by shard
    damaged: dict[str, str] = field(default_factory=dict)  # file name -> what is wrong
    doubles: list[tuple[str, str, str]] = field(default_factory=list)  # name, first, second file
    layers: dict[int, Geometry] = field(default_factory=dict)

    def in_files(self) -> dict[str, TensorRef]:
        """All tensors by their names in files."""
        found = {name_of(tensor): place for tensor, place in self.tensors.items()}
        found |= {name: one for name, one in self.others.items() if name not in self.slots}
        return found | self.stacked

    def map(self, tensor: TensorId) -> U8:
        """The tensor's bytes, mapped read-only. Raises CheckpointError if it is not there."""
        place = self.place(tensor)
        return map_file(place.file)[place.offset : place.offset + place.nbytes]

    def place(self, tensor: TensorId) -> TensorRef:
        """File and offset of a tensor. Raises CheckpointError if it is not there."""
        try:
            return self.tensors[tensor]
        except KeyError:
            raise CheckpointError(
                f"{self.directory} does not contain {name_of(tensor)}", "convert the model again"
            ) from None

    def of_layer(self, layer: int) -> dict[TensorId, TensorRef]:
        return {tensor: place for tensor, place in self.tensors.items() if tensor.layer == layer}

    def geometry(self, layer: int) -> Geometry:
        """Dimensions of a layer. Raises CheckpointError if no known format has its sizes."""
        found = self.layers.get(layer)
        if found is None or found.format is None:
            raise CheckpointError(
                f"layer {layer} of {self.directory} has no format that ktconv knows",
                f"known formats: {', '.join(output_formats())}",
            )
        return found


def open_packed(directory: Path, layer: int | None = None) -> PackedWeights:
    """The packed weights of a directory: its shards, or its layer folders if it has no shard.

    `layer`: only headers of shards that have something of this layer are parsed, and only its
    folder is looked into; what they have next to it is found, too.
    """
    found = PackedWeights(directory)
    shards = sorted(directory.glob("*.safetensors"))
    for shard in shards:
        if layer is None or _may_have(shard, layer):
            _add_shard(found, shard)
    if not shards:
        found.layout = "layers"
        _add_folders(found, "*" if layer is None else f"_layer_{layer}")
    by_layer: dict[int, dict[TensorId, TensorRef]] = defaultdict(dict)
    for tensor, place in found.tensors.items():
        by_layer[tensor.layer][tensor] = place
    if layer is not None:
        by_layer = {one: tensors for one, tensors in by_layer.items() if one == layer}
    recorded = recorded_of(directory)
    found.layers = {
        layer: _geometry(layer, tensors, recorded) for layer, tensors in sorted(by_layer.items())
    }
    return found


def _may_have(shard: Path, layer: int) -> bool:
    """False only where a sound header has nothing of a layer."""
    try:
        return header_mentions(shard, f"blk.{layer}.".encode())
    except CheckpointError:
        return True


def may_hold_packed(directory: Path) -> bool:
    """False only where no shard has a packed expert's name in its header, and no folder one."""
    shards = list(directory.glob("*.safetensors"))
    try:
        return not shards or any(header_mentions(shard, b"_exps.") for shard in shards)
    except KtconvError:  # a damaged shard says nothing
        return True


class Recorded(Struct, frozen=True):
    """Facts in the manifest of packed weights that their sizes do not show."""

    left_out: ExpertSet  # experts that quantize-cpu left out on request
    layers: Mapping[int, Mapping[str, Any]]

    def sizes(self, layer: int) -> tuple[int, int]:
        """Hidden and intermediate size of a layer; zeros where they are not recorded."""
        record = self.layers.get(layer, {})
        found = record.get("hidden_size"), record.get("intermediate_size")
        hidden, intermediate = (size if type(size) is int else 0 for size in found)
        return hidden, intermediate

    def gated(self, layer: int, tensors: Iterable[TensorId]) -> bool:
        """Whether the experts of a layer have gates: as recorded, else by these tensors of it."""
        if layer in self.layers:
            return self.layers[layer].get("gated") is not False
        return any(tensor.proj in ("gate", "gate_bwd") for tensor in tensors)


def recorded_of(directory: Path) -> Recorded:
    """Raises CheckpointError for a manifest whose excluded experts have another form than ours."""
    manifest = read_run(directory)
    record = manifest.options.get(EXCLUDED, {}) if manifest else {}
    left_out = set_of_record(record, str(directory / MANIFEST))
    return Recorded(left_out, manifest.layers if manifest else {})


def no_packed_experts(directory: Path) -> tuple[str, str]:
    """Message and hint of an error for a directory in which no packed experts were found."""
    if Journal(directory).has_run():
        return not_finished(directory)
    manifest = read_manifest(directory)
    options = {} if manifest is None else manifest.options
    hint = "give an OUTPUT of ktconv quantize-cpu --method int4 or int8"
    if (scheme := options.get("scheme")) is not None:
        return (
            f"{directory} contains no packed experts: it is an output in {scheme}, whose experts "
            "have the names of a checkpoint"
        ), hint
    if any(directory.glob("*.gguf")):
        return (
            f"{directory} contains no packed experts: it has GGUF files, which llama.cpp and "
            "KTransformers compute"
        ), hint
    if manifest is None and any(directory.glob("*.safetensors")):
        return (
            f"{directory} contains no packed experts, and no {MANIFEST}: it is a model, or an "
            "output in the names of one"
        ), f"{hint}; if it is an output, restore its {MANIFEST}"
    return f"{directory} contains no packed experts", hint


def not_finished(directory: Path) -> tuple[str, str]:
    """Message and hint of an error for an output whose conversion was interrupted, or had some of
    the layers only."""
    return (
        f"the conversion in {directory} is not finished",
        "run the same conversion again, which continues it",
    )


def listed_names(directory: Path, manifest: Manifest | None) -> Iterable[str]:
    """Names of all tensors that should be there, by the manifest or else the index; none without
    both."""
    if manifest is not None:
        return manifest.tensors
    listed = (read_index(directory) or {}).get("weight_map")
    return listed if isinstance(listed, dict) else ()


def map_file(path: Path) -> U8:
    """All bytes of a file, mapped read-only."""
    return np.frombuffer(map_pages(path), np.uint8)


def map_pages(path: Path) -> mmap.mmap:
    """A read-only mapping of a whole file. Raises ResourceError where it cannot be mapped."""
    try:
        with opened_regular(path) as fd:
            return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ResourceError(f"{path} cannot be mapped: {error}") from error


def name_of(tensor: TensorId) -> str:
    """The key of a tensor in shards."""
    return tensor_name(tensor.layer, tensor.proj, tensor.expert, tensor.part, tensor.kind)


def _add_shard(found: PackedWeights, shard: Path) -> None:
    try:
        header = read_header(shard)
    except CheckpointError as error:
        found.damaged[shard.name] = str(error)
        return
    found.headers[shard.name] = header
    for ref in header.tensors:
        tensor = parse_tensor_name(ref.name)
        earlier = found.others.get(ref.name) if tensor is None else found.tensors.get(tensor)
        if earlier is not None:
            found.doubles.append((ref.name, earlier.file.name, shard.name))
        if tensor is None:
            found.others[ref.name] = ref
        else:
            found.tensors[tensor] = ref


def _add_folders(found: PackedWeights, names: str) -> None:
    for folder in sorted(found.directory.glob(names)):
        if not _LAYER_FOLDER.fullmatch(folder.name):
            continue
        for path in sorted(folder.glob("_numa_*/*.kt")):
            name = path.relative_to(found.directory).as_posix()
            file = parse_kt_path(name)
            if file is None:
                found.damaged[name] = f"{name} is not named like a packed tensor"
                continue
            try:
                status = path.stat()
            except OSError as error:
                found.damaged[name] = f"{name} cannot be read: {error.strerror}"
                continue
            if not stat.S_ISREG(status.st_mode):
                found.damaged[name] = f"{name} is not a regular file"
                continue
            size = status.st_size
            if size != file.nbytes:
                found.damaged[name] = _wrong_size(path, name, size)
            if file.tensor in found.tensors:
                earlier = found.tensors[file.tensor].file.relative_to(found.directory).as_posix()
                found.doubles.append((name_of(file.tensor), earlier, name))
            found.tensors[file.tensor] = TensorRef(name_of(file.tensor), path, "", (), 0, size)


def _wrong_size(path: Path, name: str, size: int) -> str:
    try:
        refuse_pointer_at(path)
    except PointerError as error:
        return str(error)
    return f"{name} has {size} bytes"


def _geometry(layer: int, tensors: Mapping[TensorId, TensorRef], recorded: Recorded) -> Geometry:
    gated, left_out = recorded.gated(layer, tensors), recorded.left_out.of(layer)
    proj = PROJECTIONS[0] if gated else UNGATED[0]
    weight, first = (_usual(tensors, proj, kind) for kind in KINDS)
    down, (hidden, intermediate) = _usual(tensors, "down", "scale"), recorded.sizes(layer)
    forward: Sequence[TensorId] = [key for key in tensors if not is_backward(key.proj)]
    parts = 1 + max((key.part for key in forward), default=0)
    for fmt in output_formats().values():
        rows = _rows(fmt, first, intermediate // parts)
        cols = _rows(fmt, down, hidden)
        if fmt.check(cols, rows * parts, parts) is None and _fits(fmt, rows, cols, weight, first):
            known: Format | None = fmt
            break
    else:
        known = None
    experts = 1 + max([0, *left_out, *(key.expert for key in forward)])
    biased = any(key.kind == "bias" for key in tensors)
    return Geometry(experts, parts, cols, rows * parts, known, frozenset(left_out), biased, gated)


def _fits(fmt: Format, rows: int, cols: int, *places: TensorRef | None) -> bool:
    """Whether weight and scale have the sizes of a [rows, cols] matrix."""
    sizes = [fmt.stored(kind, rows, cols)[2] for kind in KINDS]
    return sizes == [place.nbytes if place else 0 for place in places]


def _rows(fmt: Format, scale: TensorRef | None, recorded: int) -> int:
    """Rows of the matrix with these packed scales, if they are of this format. The size of group
    scales says rows times columns only: then the header, or of a .kt file the manifest, does."""
    if scale is None:
        return 0
    if not fmt.group:
        return scale.nbytes // fmt.traits.scale_size
    if not scale.dtype:
        return recorded if scale.file.name.startswith(f"{fmt.name}_") else 0
    dtype, shape, _ = fmt.stored("scale", fmt.traits.row_multiple, fmt.traits.col_multiple)
    alike = scale.dtype == dtype and len(scale.shape) == len(shape)
    return scale.shape[0] * fmt.traits.row_multiple if alike else 0


def _usual(tensors: Mapping[TensorId, TensorRef], proj: Any, kind: Kind) -> TensorRef | None:
    """A tensor of the most common size."""
    places = [place for key, place in tensors.items() if (key.proj, key.kind) == (proj, kind)]
    counted = Counter(place.nbytes for place in places).most_common(1)
    return next((place for place in places if place.nbytes == counted[0][0]), None)
