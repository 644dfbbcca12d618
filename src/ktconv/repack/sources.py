"""Knowledge about packed weights besides their bytes: their manifest, their source.

A manifest (ktconv.json) has options, dimensions and checksums; a source says which layers
and experts there must be. Whatever is known must agree with the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError, VerificationError
from ktconv.formats import FORMATS, output_formats
from ktconv.repack.tree import Tree, TreeLayer
from ktconv.source import Checkpoint, MoELayer, SourceFile
from ktconv.source.agreement import absent_layers, contradictions
from ktconv.source.config import CONFIG_NAME, ModelConfig
from ktconv.source.settings import ModelSettings
from ktconv.source.side_files import flaws
from ktconv.system.units import counted, listed
from ktconv.targets.packed.target import Options, options_of_record
from ktconv.writer.journal import Record
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest

Dimensions = tuple[object, object, object, bool]  # experts, hidden, intermediate, with gates


# ---- manifest --------------------------------------------------------------------------


def read_known(directory: Path) -> Manifest | None:
    """The manifest of a directory, or None. CheckpointError for one that is damaged."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    manifest = read_manifest(directory)
    if manifest is None or _options(manifest) is None or manifest.damaged_units:
        raise CheckpointError(
            f"{path} is damaged", "restore it, or remove it to continue without its checksums"
        )
    return manifest


def options_of(manifest: Manifest) -> Options:
    """Options of the conversion of what `read_known` found."""
    options = _options(manifest)
    assert options is not None
    return options


def _options(manifest: Manifest) -> Options | None:
    """None where they have not the types and values that ours have."""
    options = options_of_record(manifest.options)
    return options if options and options.method in output_formats() and options.numa > 0 else None


def source_files(manifest: Manifest | None) -> list[SourceFile]:
    """The model that was converted, as far as that is known."""
    return [_source_file(file) for file in manifest.source_files.values()] if manifest else []


def _source_file(file: Record) -> SourceFile:
    mtime, etag = file.get("mtime_ns"), file.get("etag")
    checksum = file.get("sha256") if (mtime, etag) == (None, None) else file.get("header_sha256")
    return SourceFile(str(file.get("name")), file.get("bytes", 0), mtime, str(checksum), etag)


def check_side_files(manifest: Manifest | None, directory: Path) -> None:
    """Refuse side files of `directory`, which will be copied, that are not as its manifest records
    them."""
    records = manifest.side_files if manifest else None
    for flaw in flaws(directory, records) if records is not None else ():
        raise VerificationError(
            f"{directory}: {flaw.message}",
            "copy the file from the model again, remove files that do not belong "
            "there, or convert again",
        )


# ---- agreement -------------------------------------------------------------------------


def check_manifest(manifest: Manifest, tree: Tree) -> None:
    """Refuse folders that are not what their manifest says."""
    options = options_of(manifest)
    if (options.method, options.numa) != (tree.format.key, tree.parts):
        raise CheckpointError(
            f"{tree.root} contains {tree.format.name} in {counted(tree.parts, 'part')}, but "
            f"{manifest.path} says {FORMATS[options.method].name} in {options.numa}",
            "remove files of other conversions, or convert again",
        )
    if options.save_backward and not tree.backward:
        raise CheckpointError(
            f"{tree.root} contains no backward matrices, but {manifest.path} says that it does",
            "restore them, or convert again",
        )
    expected = {
        index: (
            entry.get("experts"),
            entry.get("hidden_size"),
            entry.get("intermediate_size"),
            entry.get("gated") is not False,
        )
        for index, entry in manifest.layers.items()
    }
    _check_layers(tree, expected, str(manifest.path), "convert again into an empty directory")


def check_source(tree: Tree, source: Checkpoint, mtp: bool) -> None:
    """Refuse folders that are not all layers of their source."""
    layers = source.converted(mtp)
    absent_mtp = [layer for layer in layers if layer.is_mtp and layer.index not in tree.layers]
    if absent_mtp:
        raise CheckpointError(
            f"{tree.root} does not contain the MTP layer {absent_mtp[0].index} of {source.path}",
            "add --no-mtp: the reference converter omits MTP layers",
        )
    left_out = {layer.index for layer in source.layers} - {layer.index for layer in layers}
    expected: dict[int, Dimensions] = {
        layer.index: (len(layer.experts), layer.hidden_size, layer.intermediate_size, layer.gated)
        for layer in layers
    }
    _check_layers(tree, expected, str(source.path), "convert that model again, or give its source",
                  left_out)  # fmt: skip


def _check_layers(
    tree: Tree,
    expected: Mapping[int, Dimensions],
    by: str,
    hint: str,
    ignored: set[int] | frozenset[int] = frozenset(),
) -> None:
    if missing := expected.keys() - tree.layers.keys():
        named = listed("layer", missing)
        raise CheckpointError(f"{tree.root} does not contain {named} of {by}", hint)
    if extra := tree.layers.keys() - expected.keys() - ignored:
        named = listed("layer", extra)
        raise CheckpointError(f"{tree.root} has {named}, and {by} has not", hint)
    for index, dimensions in expected.items():
        found = _dimensions(tree.layers[index])
        if found != dimensions:
            raise CheckpointError(
                f"{tree.root / f'_layer_{index}'} contains {_words(found)}, but {by} has "
                f"{_words(dimensions)}",
                hint,
            )


def _dimensions(layer: TreeLayer) -> Dimensions:
    return layer.experts, layer.hidden, layer.intermediate, layer.gated


def _words(dimensions: Dimensions) -> str:
    experts, hidden, intermediate, gated = dimensions
    words = "experts" if gated else "experts without gates"
    return f"{experts} {words} of hidden size {hidden} and intermediate size {intermediate}"


def check_alone(tree: Tree) -> None:
    """Check weights without manifest and source: all layers are alike, and none is missing in
    between."""
    layers = list(tree.layers.values())
    for layer in layers[1:]:
        if _dimensions(layer) != _dimensions(layers[0]):
            raise CheckpointError(
                f"{tree.root} has layers that differ: _layer_{layers[0].index} contains "
                f"{_words(_dimensions(layers[0]))}, _layer_{layer.index} "
                f"{_words(_dimensions(layer))}",
                "convert again; if the layers of the model differ, give --source MODEL",
            )
    dense = None
    if config := config_beside(tree.root):
        _check_config(tree, config)
        dense = config.dense_layers
    between = set(range(layers[0].index, layers[-1].index)) - tree.layers.keys()
    if gaps := [index for index in sorted(between) if not (dense and dense.key_of(index))]:
        raise CheckpointError(
            f"{tree.root} does not contain {listed('layer', gaps)} between "
            f"{layers[0].index} and {layers[-1].index}",
            "convert the missing layers; if the model has no experts there, give --source MODEL",
        )


def config_beside(root: Path) -> ModelConfig | None:
    """Config of a config.json next to the folders; None if there is none."""
    if not (root / CONFIG_NAME).exists():
        return None
    manifest = read_manifest(root)
    tower = manifest.tower if manifest else None
    return ModelSettings.beside(root, tower).checked


def _check_config(tree: Tree, config: ModelConfig) -> None:
    """A config.json next to the folders has sizes, and layers before and after them."""
    found = {
        n: (one.experts, one.hidden, one.intermediate, one.gated) for n, one in tree.layers.items()
    }
    for message, _ in contradictions(config, found):
        raise CheckpointError(
            f"{tree.root}: {message}", "convert again, or copy the config.json of this model there"
        )
    if absent := absent_layers(config, tree.layers):
        raise CheckpointError(
            f"{tree.root} does not contain {listed('layer', absent)} of the {CONFIG_NAME} there",
            "convert the missing layers; if the model has no experts there, give --source MODEL",
        )


def check_same_source(manifest: Manifest, source: Checkpoint) -> None:
    """Refuse a source that is not the model that was converted. Times do not matter."""
    before = {file.name: (file.nbytes, file.sha256) for file in source_files(manifest)}
    now = {file.name: (file.nbytes, file.sha256) for file in source.sources}
    names = sorted(before.keys() | now.keys())
    changed = [name for name in names if before.get(name) != now.get(name)]
    if before and changed:
        raise CheckpointError(
            f"{manifest.path.parent} was converted from another model than {source.path}: "
            f"{changed[0]} differs",
            "give the model that was converted as --source",
        )


def layer_alone(found: TreeLayer, record: Mapping[str, Any]) -> MoELayer:
    """A layer without its source, as plans want it; `record` is its entry in a manifest."""
    nothing: Mapping[Any, Any] = dict.fromkeys(found.projections)
    return MoELayer(
        found.index,
        str(record.get("source", "")),
        record.get("mtp") is True,
        found.hidden,
        found.intermediate,
        str(record.get("encoding", "packed")),
        [nothing] * found.experts,
    )
