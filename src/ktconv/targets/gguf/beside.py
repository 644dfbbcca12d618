"""The GGUF file that a whole model is made with (`--with`): all but its experts is taken over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv.errors import CheckpointError, UsageError
from ktconv.source import Checkpoint, MoELayer, open_checkpoint, source_identity
from ktconv.source.gguf.file import read_raw_pairs
from ktconv.source.gguf.parts import is_gguf
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.source.remote.urls import url_of_path
from ktconv.system.arrays import F32
from ktconv.system.units import counted, listed

# Pairs that the output has of its own.
_OWN = ("general.alignment", "general.file_type", "general.quantization_version")
_NO_MTP = "leave its layers for multi-token prediction out as well: --no-mtp"
_LEAST_LIKENESS = 0.5  # cosine; types of 2 bits stay above 0.8, experts of others are near 0
_OTHER = "give a GGUF file of the same model, as convert_hf_to_gguf of llama.cpp makes it"


class Beside(Struct, frozen=True):
    """An opened GGUF model, and its key-value pairs as they are stored."""

    checkpoint: Checkpoint
    pairs: Sequence[bytes]

    def record(self) -> list[dict[str, Any]]:
        """Identity of its files, as the manifest records it."""
        return source_identity(self.checkpoint)

    def check(self, layers: Sequence[MoELayer], architectures: Sequence[str]) -> None:
        """CheckpointError unless it has exactly these MoE layers, with experts of the same number
        and sizes, and one of `architectures`, where there are any."""
        path = self.checkpoint.path
        there = {layer.index: layer for layer in self.checkpoint.layers}
        here = {layer.index: layer for layer in layers}
        if odd := sorted(there.keys() ^ here.keys()):
            missing = [index for index in odd if index in here]
            raise CheckpointError(
                f"--with {path} is of another model: it has "
                + (f"no experts in {listed('layer', missing)}" if missing else "")
                + (" and " if missing and len(missing) < len(odd) else "")
                + (
                    f"experts in {listed('layer', [one for one in odd if one in there])}, "
                    "which are not converted"
                    if len(missing) < len(odd)
                    else ""
                ),
                _NO_MTP if all(index in here and here[index].is_mtp for index in odd) else _OTHER,
            )
        for index, layer in here.items():
            ours, theirs = _sizes(layer), _sizes(there[index])
            if ours != theirs:
                raise CheckpointError(
                    f"--with {path} is of another model: layer {index} has {theirs} there, and "
                    f"{ours} in the model",
                    _OTHER,
                )
        if architectures and self.checkpoint.architecture not in architectures:
            raise CheckpointError(
                f"--with {path} is of another model: its general.architecture is "
                f"{self.checkpoint.architecture}, and the model's is {' or '.join(architectures)}",
                _OTHER,
            )

    def check_likeness(self, reader: SourceReader, layer: MoELayer) -> None:
        """CheckpointError where its experts are not about those of `layer`, in whatever encoding
        both are: some rows of one expert are compared. `reader` has the files of both."""
        own = _rows(reader, layer)
        other = _rows(
            reader, next(one for one in self.checkpoint.layers if one.index == layer.index)
        )
        both = min(len(own), len(other))
        a, b = own[:both].ravel(), other[:both].ravel()
        if a @ b < _LEAST_LIKENESS * np.sqrt((a @ a) * (b @ b)):
            raise CheckpointError(
                f"--with {self.checkpoint.path} is of another model: the experts of layer "
                f"{layer.index} have other weights there",
                _OTHER,
            )


def _rows(reader: SourceReader, layer: MoELayer) -> F32:
    """The first rows of up of the first expert."""
    _, values = next(iter(MatrixReader(reader, layer.experts[0]["up"]).decoded()))
    return values


def open_beside(path: Path) -> Beside:
    """Raises UsageError for a URL, CheckpointError for what is no GGUF model with experts."""
    if url := url_of_path(path):
        raise UsageError(f"--with {url} is a URL", "give a GGUF file on this machine")
    if not os.path.lexists(path):
        raise CheckpointError(f"--with {path} does not exist", _OTHER)
    if path.is_file() and not is_gguf(path):
        raise CheckpointError(f"--with {path} is no GGUF model", _OTHER)
    checkpoint = open_checkpoint(path)
    if not checkpoint.is_gguf:
        raise CheckpointError(f"--with {path} is no GGUF model", _OTHER)
    pairs = [
        raw
        for key, raw in read_raw_pairs(checkpoint.files[0])
        if key not in _OWN and not key.startswith("split.")
    ]
    return Beside(checkpoint, pairs)


def _sizes(layer: MoELayer) -> str:
    gate = ("with gates" if layer.gated else "without gates") + " and biases" * layer.biased
    experts = counted(len(layer.experts), "expert")
    return (
        f"{experts} of hidden size {layer.hidden_size} and intermediate size "
        f"{layer.intermediate_size} {gate}"
    )
