"""Packed weights that are all there, in shards or layer folders, ours or another tool's.

packed = open_complete(Path("qwen3-int4"))
packed.tree.parts, packed.options.method, packed.weights.map(tensor)
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from ktconv.errors import CheckpointError
from ktconv.formats import TensorId, is_backward, parse_tensor_name
from ktconv.repack.sources import check_alone, check_manifest, options_of, read_known
from ktconv.repack.tree import Tree, TreeLayer, read_tree, refuse_mixtures, refuse_unfinished
from ktconv.source import SourceFile
from ktconv.source.reading.reader import SourceReader
from ktconv.system.units import counted
from ktconv.targets.packed.target import Options
from ktconv.targets.packed.weights import (
    PackedWeights,
    listed_names,
    name_of,
    no_packed_experts,
    open_packed,
)
from ktconv.writer.journal import Record
from ktconv.writer.manifest import Manifest

_VERIFY = "run ktconv verify for a full list of faults, then convert the model again"


class CompleteWeights(Struct, frozen=True):
    """Packed weights, their dimensions and how they were made."""

    weights: PackedWeights
    tree: Tree
    manifest: Manifest | None
    options: Options

    @property
    def directory(self) -> Path:
        return self.weights.directory

    @property
    def records(self) -> dict[str, Record]:
        """Facts that change when the files do."""
        if self.weights.layout == "layers":
            return {f"_layer_{layer.index}": layer.record for layer in self.tree.layers.values()}
        return {
            name: {
                "bytes": header.file_bytes,
                "mtime_ns": header.mtime_ns,
                "header_sha256": header.sha256,
            }
            for name, header in self.weights.headers.items()
        }

    def reader(self) -> SourceReader:
        """Reads the files and refuses a shard that changed meanwhile."""
        headers = self.weights.headers.values()
        sources = [
            SourceFile(header.file.name, header.file_bytes, header.mtime_ns, header.sha256)
            for header in headers
        ]
        return SourceReader([header.file for header in headers], sources)


def open_complete(directory: Path) -> CompleteWeights:
    """Open and judge; CheckpointError names what is missing or does not fit."""
    refuse_unfinished(directory, "an OUTPUT of quantize-cpu")
    weights = open_packed(directory)
    tree = _tree_of_shards(weights) if weights.headers or weights.damaged else read_tree(directory)
    manifest = read_known(directory)
    if manifest is None:
        check_alone(tree)
    else:
        check_manifest(manifest, tree)
    _refuse_unlisted(weights, manifest)
    return CompleteWeights(weights, tree, manifest, _options(weights, tree, manifest))


def _refuse_unlisted(weights: PackedWeights, manifest: Manifest | None) -> None:
    """Whatever manifest or index list is there, other tensors too."""
    for name in listed_names(weights.directory, manifest):
        tensor = parse_tensor_name(name)
        if name not in weights.others and (tensor is None or tensor not in weights.tensors):
            raise CheckpointError(f"{weights.directory} does not contain {name}", _VERIFY)


def _options(weights: PackedWeights, tree: Tree, manifest: Manifest | None) -> Options:
    """Options of the conversion; without a manifest those of the reference converter, as far as we
    know."""
    made = options_of(manifest) if manifest else Options(compat=True)
    return replace(
        made,
        method=tree.format.key,
        numa=tree.parts,
        layout="safetensors",
        experts_only=not weights.others,
    )


def _tree_of_shards(weights: PackedWeights) -> Tree:
    """The layers of shards, judged as layer folders are."""
    for why in weights.damaged.values():
        raise CheckpointError(why, _VERIFY)
    for name, first, second in weights.doubles:
        raise CheckpointError(
            f"{weights.directory} contains {name} twice, in {first} and in {second}",
            "remove shards of other conversions",
        )
    if not weights.layers:
        raise CheckpointError(*no_packed_experts(weights.directory))
    tree = Tree(weights.directory, {index: _layer(weights, index) for index in weights.layers})
    refuse_mixtures(tree)
    return tree


def _layer(weights: PackedWeights, index: int) -> TreeLayer:
    geometry = weights.geometry(index)
    found = weights.of_layer(index)
    layer = TreeLayer(
        **asdict(geometry),
        index=index,
        backward=any(is_backward(tensor.proj) for tensor in found),
        files=len(found),
        total_bytes=sum(place.nbytes for place in found.values()),
        sha256="",
    )
    _refuse_incomplete(weights, layer)
    return layer


def _refuse_incomplete(weights: PackedWeights, layer: TreeLayer) -> None:
    expected = set(layer.all_tensors())
    found = weights.of_layer(layer.index)
    if missing := sorted(map(name_of, expected - found.keys())):
        more = f" and {counted(len(missing) - 1, 'more tensor')}" if missing[1:] else ""
        raise CheckpointError(f"{weights.directory} does not contain {missing[0]}{more}", _VERIFY)
    if extra := sorted(map(name_of, found.keys() - expected)):
        raise CheckpointError(
            f"{weights.directory} contains the unexpected tensor {extra[0]}", _VERIFY
        )
    for tensor, place in found.items():
        _refuse_odd_size(layer, tensor, place.nbytes, place.file)


def _refuse_odd_size(layer: TreeLayer, tensor: TensorId, nbytes: int, file: Path) -> None:
    expected = layer.tensor_nbytes(tensor)
    if nbytes != expected:
        raise CheckpointError(
            f"{name_of(tensor)} in {file} has {nbytes} bytes, not {expected}", _VERIFY
        )
