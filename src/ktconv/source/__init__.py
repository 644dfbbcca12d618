"""Opening MoE checkpoints, safetensors or GGUF: where the weights of each expert are stored.

    checkpoint = open_checkpoint("path/to/model")
    checkpoint.layers[0].experts[5]["gate"]     # an ExpertMatrix: file, offset, strides

Only headers are read, each once; torch and numpy are not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.activations import assumed_activation, expert_activation
from ktconv.families.config import Config
from ktconv.families.family import PROJECTIONS, ExpertActivation, Projection
from ktconv.families.unread import UNREAD
from ktconv.source.adapter.beside import adapter_notes
from ktconv.source.agreement import check_agreement
from ktconv.source.config import (
    CONFIG_NAME,
    ConfigFile,
    interpret_config,
    read_config,
    side_directory_of,
    with_quantize_config,
)
from ktconv.source.gguf.config import config_of_metadata, refuse_unread
from ktconv.source.gguf.hub_names import HUB_NAMES
from ktconv.source.index import Index
from ktconv.source.layers import build_layers
from ktconv.source.map_guess import no_experts
from ktconv.source.mapped import Mapped, check_encodings, split_mapped
from ktconv.source.mapped import notes_of as notes_of_map
from ktconv.source.model_source import ModelSource as ModelSource
from ktconv.source.naming_map import NamingMap
from ktconv.source.safetensors_file import Header, read_header
from ktconv.source.settings import ModelSettings
from ktconv.source.shards import (
    Shards,
    ShardSelection,
    read_shards,
    select_shards,
)
from ktconv.source.stacks import Split, split_tensors
from ktconv.source.towers import MODALITIES, choose_tower
from ktconv.source.types import (
    BlockGrid,
    Checkpoint,
    ExpertMatrix,
    MoELayer,
    Quantization,
    SourceFile,
    TensorRef,
)
from ktconv.system.collector import collector_paused
from ktconv.system.text import path_text


@collector_paused()
def open_checkpoint(model: ModelSource | str | Path) -> Checkpoint:
    """Open the checkpoint that `model` means, see `ModelSource`.

    config.json and other side files are those of its `config`, else those next to the safetensors
    files; a GGUF model without it has a config.json of its metadata. Everything that headers
    contain is validated. Raises CheckpointError (or ResourceError where the system refuses) with
    the file or tensor in its message.
    """
    source = ModelSource.of(model)
    naming = source.naming()
    place = source.place()
    selection = select_shards(place)
    side_directory = side_directory_of(place, selection.gguf, source.config)
    file = None
    if side_directory is not None:
        file = read_config(side_directory, None if selection.gguf else place)
    shards = read_shards(selection)
    headers = shards.headers
    if selection.gguf:
        refuse_unread(headers)
        if naming is not None:
            raise UsageError("--map is not for GGUF models, whose names are known", "omit --map")
    if file is None:
        file = config_of_metadata(headers[0])
    content = file.content if naming is None else naming.applied(file.content)
    config = Config(content)
    if naming is None:
        _check_is_read(config)
        split, mapped = split_tensors(shards.tensors), None
    else:
        split, mapped = split_mapped(list(shards.tensors), naming)
    with _indexed(selection.index, shards), _naming(headers[0], file), _mapping(mapped):
        chosen = choose_tower(split, config, source.tower)
        if chosen is not None:
            split, config = chosen.split, chosen.config
        apart = chosen is None or chosen.name not in MODALITIES[1:]  # has routers of its own names
        read = ModelSettings(config, file.content if chosen else None)
        settings = interpret_config(config, file.described)
        packing = None
        some = split.stacks[0].tensors if split.stacks else ()
        if side_directory and any(rest.endswith("qweight") for rest in some):
            settings, packing = with_quantize_config(settings, file, side_directory, config)
        if not split.stacks:
            raise no_experts(split.others, settings)
        layers, notes = build_layers(split, settings, apart)
        if packing is not None and any("gptq" in layer.encoding for layer in layers):
            raise packing  # of AWQ it names the order of words, which are read by their shapes
        if apart:
            notes = [*notes, *check_agreement(config, settings, layers, split.others)]
        if chosen is not None:
            layers = [replace(one, first_expert=chosen.first_expert) for one in layers]
            notes = [*chosen.notes, *notes]
        activations = {one.index: expert_activation(config, one.index) for one in layers}
        layers = [
            replace(one, activation=replace(activations[one.index], biases=one.biased))
            for one in layers
        ]
        if assumed := assumed_activation(config):
            notes = [*notes, assumed]
        if mapped is not None:
            check_encodings(layers, mapped)
            notes = [*notes_of_map(mapped, file.content), *map(mapped.spelt, notes)]
    if file.made is not None:
        notes = [_of_metadata(note, headers[0]) for note in notes]
    architecture = str(headers[0].metadata.get("general.architecture")) if selection.gguf else None
    if hub_names := HUB_NAMES.get(architecture or ""):
        layers = [replace(one, hub_names=hub_names.experts(one.index)) for one in layers]
    sources = shards.states
    if file.made is None:
        sources.insert(0, SourceFile(CONFIG_NAME, file.file_bytes, None, file.sha256))
    adapters = adapter_notes(place, side_directory)
    opened = Checkpoint(
        path=selection.files[0] if selection.gguf else place,
        config=read,
        files=selection.files,
        layers=layers,
        other_tensors=split.others,
        notes=[*shards.notes, *adapters, *notes],
        sources=sources,
        side_directory=side_directory,
        made_files={} if file.made is None else {CONFIG_NAME: file.made},
        architecture=architecture,
        tower=None if chosen is None else chosen.name,
        mapped=mapped,
        unused_bytes=sum(header.unused_bytes for header in headers),
        index_decides=shards.deciding is not None,
    )
    for view in source.views():
        opened = view(opened)
    return opened


def _of_metadata(text: str, header: Header) -> str:
    return text.replace(CONFIG_NAME, f"the metadata of {header.file.name}")


def _check_is_read(config: Config) -> None:
    if reason := UNREAD.get(config.type):
        raise CheckpointError(
            f"experts of {config.type} are not supported as an input: {reason}",
            "docs/families.md lists the models that are read.",
        )


@contextmanager
def _naming(header: Header, config: ConfigFile) -> Iterator[None]:
    """Errors name the metadata where there is no config.json."""
    try:
        yield
    except CheckpointError as error:
        if config.made is None:
            raise
        message = _of_metadata(str(error), header)
        raise CheckpointError(
            message,
            "If the metadata are wrong, give a config.json with --config DIR; if the file is "
            "damaged, download it again."
            if message != str(error)
            else error.hint,
        ) from None


@contextmanager
def _indexed(index: Index | None, shards: Shards) -> Iterator[None]:
    """Hints name tensors that an index does not list, since they may be what is missing."""
    try:
        yield
    except CheckpointError as error:
        if index is not None and (count := shards.unlisted):
            error.hint = (
                f"{index.path.name} does not list {count} of the tensors in its shards, which are "
                f"ignored: without this file they are read. {error.hint or ''}".rstrip()
            )
        raise


@contextmanager
def _mapping(mapped: Mapped | None) -> Iterator[None]:
    """Errors have the names of the checkpoint, not those that a map gives them."""
    try:
        yield
    except CheckpointError as error:
        if mapped is None:
            raise
        hint = (error.hint or "").replace(f"in {CONFIG_NAME}", f"in {CONFIG_NAME} or [config]")
        raise CheckpointError(mapped.spelt(str(error)), hint or None) from None


def check_headers(source: ModelSource) -> Path:
    """The place of a model. Raises CheckpointError where headers, index or config.json contradict
    themselves.

    For checkpoints that transformers loads, whose encoding `open_checkpoint` may not support.
    """
    place = source.place()
    selection = select_shards(place)
    read_shards(selection)
    directory = side_directory_of(place, selection.gguf, source.config)
    if directory is not None:
        interpret_config(Config(read_config(directory).content))
    return place


def gguf_refusal(path: Path, reason: str) -> CheckpointError:
    """Error for what can only be done with a safetensors checkpoint."""
    return CheckpointError(
        f"{path} is a GGUF model, which is not supported here: {reason}",
        "Use the safetensors checkpoint of the same model.",
    )


def source_identity(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Identity of this state of the checkpoint, as JSON-ready objects.

    One per file: config.json with name, bytes and sha256; each shard with name, bytes,
    mtime_ns (etag, of one that is read over a network) and header_sha256, all as they were when
    the checkpoint was opened.
    """
    return [
        {"name": source.name, "bytes": source.nbytes} | _state(source)
        for source in checkpoint.sources
    ]


def _state(source: SourceFile) -> dict[str, Any]:
    if source.etag is not None:
        return {"etag": source.etag, "header_sha256": source.sha256}
    if source.mtime_ns is None:
        return {"sha256": source.sha256}
    return {"mtime_ns": source.mtime_ns, "header_sha256": source.sha256}
