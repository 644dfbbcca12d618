"""Weights of squared errors for a conversion, from a file of importance (`--importance FILE`).

weights = open_weights(Path("importance.safetensors"), checkpoint, plan.moe_layers)
weights.of(3, 17, "down")                    # float32 [I] of mean 1

What is said of every layer before anything is written: how many tokens its experts got.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ktconv.errors import SourceChangedError, UsageError
from ktconv.quantize.packed.importance.channel_weights import channel_weights
from ktconv.source import Checkpoint, MoELayer, Projection
from ktconv.stats.importance import open_importance
from ktconv.stats.importance_file import ImportanceFile
from ktconv.stats.origin import Sizes
from ktconv.stats.router_sample import notes_on_origin
from ktconv.system.arrays import F32, I64
from ktconv.system.files import translated
from ktconv.system.regular_files import opened_regular
from ktconv.system.text import path_text
from ktconv.system.units import listed
from ktconv.targets.packed.target import ImportanceRecord

_OTHER = "give the importance of this model: ktconv stats MODEL --importance FILE"
_KEPT_LAYERS = 2  # by `of`
_CHUNK = 1 << 20

_Identity = tuple[int, int, int]  # inode, size and modification time of a file


class LayerWeights:
    """Weights of one layer: gate_up [E, H], down [E, I]."""

    def __init__(self, gate_up: F32, down: F32) -> None:
        self._gate_up, self._down = gate_up, down

    def of(self, expert: int, projection: Projection) -> F32:
        """[inputs]"""
        weights: F32 = (self._down if projection == "down" else self._gate_up)[expert]
        return weights


class ExpertWeights:
    """Weights of the layers of `coverage`; they are computed when they are asked for."""

    def __init__(
        self,
        file: ImportanceFile,
        record: ImportanceRecord,
        identity: _Identity,
        coverage: Mapping[int, I64],
        notes: Sequence[str],
    ) -> None:
        self.record, self.coverage, self.notes = record, coverage, notes
        self._file, self._identity = file, identity
        self._kept = lru_cache(_KEPT_LAYERS)(self.layer)
        self._lock = threading.Lock()

    def layer(self, index: int) -> LayerWeights | None:
        """Weights of one layer; None for an MTP layer that the file lacks. SourceChangedError for a
        file that is another now."""
        if index not in self.coverage:
            return None
        found = self._file.layer(index)
        self.check_unchanged()
        return LayerWeights(
            channel_weights(found.gate_up, found.counts), channel_weights(found.down, found.counts)
        )

    def check_unchanged(self) -> None:
        """SourceChangedError where the file is not the recorded one any more."""
        if _identity(self._file.path) != self._identity:
            raise SourceChangedError(f"{self._file.path} changed while it was used")

    def of(self, layer: int, expert: int, projection: Projection) -> F32 | None:
        """[inputs of this matrix] of mean 1; None as in `layer`. For use from several threads, and
        layer after layer: the last two are kept."""
        with self._lock:  # one thread computes a layer
            found = self._kept(layer)
        return None if found is None else found.of(expert, projection)

    def memory(self, layers: int) -> int:
        """Bytes, with the weights of `layers`, and what computing those of one takes."""
        sizes = [self._file.sizes[index] for index in self.coverage]
        values = max(one.experts * (one.hidden + one.intermediate) for one in sizes)
        widest = max(one.experts * max(one.hidden, one.intermediate) for one in sizes)
        return 4 * values * (layers + 1) + 4 * 8 * widest


def open_weights(path: Path, checkpoint: Checkpoint, layers: Sequence[MoELayer]) -> ExpertWeights:
    """The weights of `layers`, those of `checkpoint` that are converted. Reads all of the file.

    Raises UsageError, in one sentence, for a file that is damaged, of another model, or lacks a
    layer that is not an MTP layer; ResourceError where the system refuses.
    """
    open_importance(path)  # says what is wrong with a path that is no such file
    identity = _identity(path)
    file = open_importance(path)
    _check_sizes(file, checkpoint)
    _check_layers(file, layers)
    coverage = {}
    for layer in layers:
        if layer.index in file.sizes:
            coverage[layer.index] = _covered(file, layer.index)
    record = ImportanceRecord(file.path.name, _sha256(file.path), file.kind)
    notes = [*notes_on_origin(path, file.origin, checkpoint), *_mtp_notes(file, layers)]
    weights = ExpertWeights(file, record, identity, coverage, notes)
    weights.check_unchanged()
    return weights


def _covered(file: ImportanceFile, index: int) -> I64:
    """Tokens that the experts of a layer got; its values are checked too."""
    found = file.layer(index)
    for values, what in ((found.gate_up, "gate and up"), (found.down, "down")):
        if not (values.any(axis=1) & (found.counts > 0)).any():
            raise UsageError(
                f"{file.path} has no inputs of {what} in layer {index}: "
                + ("no expert got a token" if not found.counts.any() else "all are 0"),
                "record it with more text",
            )
    return found.counts


# ---- whether it is of this model -------------------------------------------------------


def _check_sizes(file: ImportanceFile, checkpoint: Checkpoint) -> None:
    """UsageError for layers that the model does not have, or of other sizes there."""
    there = {layer.index: Sizes.of(layer) for layer in checkpoint.layers}
    if beyond := [index for index in file.sizes if index not in there]:
        raise UsageError(
            f"{file.path} is of another model: it has {listed('MoE layer', beyond)}, which "
            f"{checkpoint.path} does not have",
            _OTHER,
        )
    for index, sizes in file.sizes.items():
        if sizes != there[index]:
            raise UsageError(
                f"{file.path} is of another model: layer {index} has {sizes.words} there, and "
                f"{there[index].words} in {checkpoint.path}",
                _OTHER,
            )


def _check_layers(file: ImportanceFile, layers: Sequence[MoELayer]) -> None:
    missing = [one.index for one in layers if one.index not in file.sizes and not one.is_mtp]
    if missing:
        raise UsageError(
            f"{file.path} has no importance of {listed('layer', missing)}",
            "record all layers: ktconv stats MODEL --importance FILE, without --layers",
        )


def _mtp_notes(file: ImportanceFile, layers: Sequence[MoELayer]) -> list[str]:
    missing = [one.index for one in layers if one.index not in file.sizes]
    if not missing:
        return []
    return [
        f"{path_text(file.path)} has no importance of {listed('MTP layer', missing)}: all "
        "errors count the same there"
    ]


# ---- the file --------------------------------------------------------------------------


def _identity(path: Path) -> _Identity:
    """Changes when the file does."""
    with translated("read", path):
        status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with (
        opened_regular(path) as fd,
        open(fd, "rb", closefd=False) as file,
        translated("read", path),
    ):
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()
