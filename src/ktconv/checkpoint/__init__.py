"""Opening Hugging Face MoE checkpoints: where the weights of each expert are stored.

    checkpoint = open_checkpoint("path/to/model")
    checkpoint.layers[0].experts[5]["gate"]     # an ExpertMatrix: file, offset, strides

Only headers are read, each once; torch and numpy are not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktconv.checkpoint.config import CONFIG_NAME, interpret_config, read_config, read_description
from ktconv.checkpoint.layers import build_layers
from ktconv.checkpoint.locate import locate_model
from ktconv.checkpoint.safetensors_file import Header, read_header
from ktconv.checkpoint.shards import read_shards, select_shards
from ktconv.checkpoint.stacks import split_tensors
from ktconv.checkpoint.types import (
    BlockGrid,
    Checkpoint,
    ExpertMatrix,
    MoELayer,
    Quantization,
    SourceFile,
    TensorRef,
)
from ktconv.families.family import PROJECTIONS, Projection
from ktconv.system.collector import collector_paused
from ktconv.system.text import path_text


@collector_paused()
def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open the checkpoint in directory `model`, or the cached hub model `org/name`.

    Everything that headers contain is validated. Raises CheckpointError (or
    ResourceError where the system refuses) with the file or tensor in its message.
    """
    directory = locate_model(model)
    selection = select_shards(directory)
    config = read_config(directory)
    headers = read_shards(selection)
    split = split_tensors(tensor for header in headers for tensor in header.tensors)
    described = read_description(directory)
    layers, notes = build_layers(split, interpret_config(config.content, described))
    sources = [SourceFile(CONFIG_NAME, config.file_bytes, None, config.sha256)]
    for header in headers:
        name = path_text(header.file.name)
        sources.append(SourceFile(name, header.file_bytes, header.mtime_ns, header.sha256))
    return Checkpoint(
        path=directory,
        config=config.content,
        files=selection.files,
        layers=layers,
        other_tensors=split.others,
        notes=[*selection.notes, *notes],
        sources=sources,
    )


def check_headers(directory: Path) -> None:
    """Raises CheckpointError where headers, index or config.json contradict themselves.

    For checkpoints that transformers loads, whose encoding `open_checkpoint` may not support.
    """
    read_shards(select_shards(directory))
    interpret_config(read_config(directory).content)


def source_identity(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """What identifies this state of the checkpoint, as JSON-ready objects.

    One per file: config.json with name, bytes and sha256; each shard with name, bytes,
    mtime_ns and header_sha256, all as they were when the checkpoint was opened.
    """
    return [
        {"name": source.name, "bytes": source.nbytes}
        | (
            {"sha256": source.sha256}
            if source.mtime_ns is None
            else {"mtime_ns": source.mtime_ns, "header_sha256": source.sha256}
        )
        for source in checkpoint.sources
    ]
