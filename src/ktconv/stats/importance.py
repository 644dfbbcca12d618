"""Magnitudes of the inputs of each expert's matrices: the mean square of every channel.

FILE is a safetensors file; for layer L with E experts of hidden size H and intermediate size I

    layers.L.gate_up   float32 [E, H]   of the inputs of gate_proj and up_proj, which are the same
    layers.L.down      float32 [E, I]   of the inputs of down_proj: activated intermediates
    layers.L.counts    int64 [E]        tokens that each expert got

Experts without tokens have zeros. docs/calibration.md describes the metadata. llama.cpp's imatrix
files, which have the same numbers, are read too: see `imatrix`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from ktconv.errors import CheckpointError, ResourceError, UsageError
from ktconv.stats.imatrix import Imatrix, is_imatrix
from ktconv.stats.importance_file import ImportanceFile, LayerImportance
from ktconv.stats.origin import Origin, Sizes
from ktconv.stats.stored import StatisticsFile
from ktconv.system.arrays import F32, I64, Array
from ktconv.writer.option_files import ATTEMPT, WrittenFile
from ktconv.writer.shards import Tensor as Planned
from ktconv.writer.shards import plan_shard
from ktconv.writer.staging import ShardStaging

if TYPE_CHECKING:
    from torch import Tensor

KIND = "ktconv-importance"
OPTION = "--importance FILE"
_ROWS = 4096  # tokens whose squares are in memory at a time
_COUNTS = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.counts")


class Importance(Struct, frozen=True):
    """All layers of a file, and where they come from; None: an imatrix does not tell."""

    layers: Mapping[int, LayerImportance]
    origin: Origin | None


def open_importance(path: str | Path) -> ImportanceFile:
    """A file of `ktconv stats --importance`, or an imatrix of llama.cpp in GGUF form: whichever
    it begins like. Its header is checked; layers are read when they are asked for.

    Raises UsageError, naming the file, for any other file and a damaged one; ResourceError where
    the system refuses.
    """
    path = Path(path)
    return Imatrix(path) if is_imatrix(path) else RecordedImportance(path)


def importance_file(path: Path) -> WrittenFile:
    """FILE of --importance of `ktconv stats`."""
    return WrittenFile(path, "--importance", "a file of importance that ktconv wrote", _is_recorded)


def _is_recorded(path: Path) -> bool:
    RecordedImportance(path)
    return True


def read_importance(path: str | Path) -> Importance:
    """All layers of such a file, in memory.

    Raises UsageError as `open_importance` does, and for values that are negative or not finite,
    and experts with values but no tokens.
    """
    file = open_importance(path)
    return Importance({layer: file.layer(layer) for layer in file.sizes}, file.origin)


class RecordedImportance(ImportanceFile):
    """Importance that `ktconv stats --importance` wrote."""

    kind = KIND

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, StatisticsFile(path, KIND, OPTION)
        self.origin = self._file.origin
        names = self._file.names
        layers = sorted(int(found[1]) for found in map(_COUNTS.fullmatch, names) if found)
        if not layers or len(names) != 3 * len(layers):
            raise self.damaged("its tensors are not three of each layer")
        self.sizes = {layer: self._sizes(layer) for layer in layers}

    def damaged(self, why: str) -> UsageError:
        return self._file.damaged(why)

    def _sizes(self, layer: int) -> Sizes:
        """Sizes as the layer's first tensor says; the others are checked when they are read."""
        gate_up, down, _ = _names(layer)
        experts, hidden = self._file.rows_and_columns(gate_up)
        return Sizes(experts, hidden, self._file.rows_and_columns(down)[1])

    def layer(self, index: int) -> LayerImportance:
        sizes, names = self.sizes[index], _names(index)
        counts: I64 = self._file.array(names[2], "I64", sizes.experts)
        if (counts < 0).any():
            raise self.damaged(f"tensor {names[2]} has negative counts")
        values: list[F32] = []
        for name, size in zip(names, (sizes.hidden, sizes.intermediate), strict=False):
            value: F32 = self._file.array(name, "F32", sizes.experts, size)
            self.check_values(name, value, counts)
            values.append(value)
        return LayerImportance(values[0], values[1], counts)


def _names(layer: int) -> tuple[str, str, str]:
    return f"layers.{layer}.gate_up", f"layers.{layer}.down", f"layers.{layer}.counts"


def _named(layer: int, one: LayerImportance) -> dict[str, Array]:
    arrays: tuple[Array, ...] = one.gate_up, one.down, one.counts
    return dict(zip(_names(layer), arrays, strict=True))


def _planned(layer: int, sizes: Sizes) -> list[Planned]:
    """The tensors of a layer."""
    gate_up, down, counts = _names(layer)
    e, h, i = sizes.experts, sizes.hidden, sizes.intermediate
    return [
        Planned(gate_up, "F32", (e, h), 4 * e * h),
        Planned(down, "F32", (e, i), 4 * e * i),
        Planned(counts, "I64", (e,), 8 * e),
    ]


def nbytes(layers: Mapping[int, Sizes]) -> int:
    """Bytes of the data of a file with these layers."""
    return sum(one.nbytes for n, sizes in layers.items() for one in _planned(n, sizes))


def memory(layers: Mapping[int, Sizes]) -> int:
    """Bytes that an `ImportanceTap` takes."""
    return max(
        2 * 8 * one.experts * (one.hidden + one.intermediate)
        + 3 * 4 * _ROWS * max(one.hidden, one.intermediate)
        for one in layers.values()
    )


class ImportanceTap:
    """Gathers the mean squares of `layers`; memory is that of one layer.

    Each finished layer is a file of `folder`, by which a later run goes on; `write` joins them.
    """

    wants_inputs = True

    def __init__(self, layers: Mapping[int, Sizes], origin: Origin, folder: Path) -> None:
        self._layers, self._folder = layers, folder
        self._metadata = origin.metadata(KIND)
        self._sums: tuple[Array, Array] | None = None
        self._counts: I64 = np.zeros(0, np.int64)

    def chosen(self, layer: int, window: int, ids: Tensor, weights: Tensor) -> None:
        pass

    def inputs(self, layer: int, expert: int, rows: Tensor, inner: Tensor, weights: Tensor) -> None:
        """Add an expert's tokens: inputs of gate and up [n, H], of down [n, I]. CheckpointError
        where they are not finite."""
        sizes = self._layers.get(layer)
        if sizes is None:
            return
        if self._sums is None:
            self._begin(sizes)
        assert self._sums is not None
        for total, values in zip(self._sums, (rows, inner), strict=True):
            total[expert] += squares(values)
            if not np.isfinite(total[expert]).all():
                raise not_finite(layer, expert)
        self._counts[expert] += len(rows)

    def _begin(self, sizes: Sizes) -> None:
        self._sums = (
            np.zeros((sizes.experts, sizes.hidden)),
            np.zeros((sizes.experts, sizes.intermediate)),
        )
        self._counts = np.zeros(sizes.experts, np.int64)

    def layer_done(self, layer: int) -> None:
        if (sizes := self._layers.get(layer)) is None:
            return
        if self._sums is None:  # no expert of it got a token
            self._begin(sizes)
        assert self._sums is not None
        times = np.maximum(self._counts, 1)[:, None]
        means = [(total / times).astype(np.float32) for total in self._sums]
        arrays = _named(layer, LayerImportance(means[0], means[1], self._counts))
        self._write(self._file(layer), [layer], lambda _: arrays)
        self._sums = None

    def _file(self, layer: int) -> Path:
        return self._folder / f"importance-{layer:05}.safetensors"

    def state(self) -> Mapping[str, Array]:
        """The layers whose files are complete."""
        done = [layer for layer in self._layers if self._file(layer).exists()]
        return {"layers": np.array(done, np.int64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """ResourceError where a file is missing or damaged."""
        for layer in state["layers"]:
            self._finished(int(layer))

    def _finished(self, layer: int) -> Mapping[str, Array]:
        path = self._file(layer)
        try:
            found = RecordedImportance(path).layer(layer)
        except UsageError as error:
            raise ResourceError(
                f"{path}, with which an interrupted run goes on, cannot be used: {error}",
                f"remove {self._folder}, then run the same command again",
            ) from error
        return _named(layer, found)

    def write(self, path: Path) -> None:
        """Replace `path` by a file of all layers, in one step. UsageError where there is another
        file, or a model around it."""
        file = importance_file(path)
        file.check()
        self._write(file.place, self._layers, self._finished)

    def _write(
        self,
        path: Path,
        layers: Iterable[int],
        arrays_of: Callable[[int], Mapping[str, Array]],
    ) -> None:
        tensors = [tensor for layer in layers for tensor in _planned(layer, self._layers[layer])]
        shard = plan_shard(path.name, tensors, self._metadata)
        folder = path.absolute().parent
        staging = ShardStaging([shard], folder, folder, ATTEMPT)
        try:
            for layer in layers:
                for name, array in arrays_of(layer).items():
                    staging.write(name, array.data.cast("B"), 0)
            staging.commit()
        except BaseException:
            staging.abandon()
            raise


def squares(values: Tensor) -> Array:
    """float64 [channels]: the sum of squares over the tokens of [n, channels]."""
    import torch

    total = torch.zeros(values.shape[1], dtype=torch.float64)
    for block in torch.split(values.detach(), _ROWS):
        total += block.float().square().sum(dim=0, dtype=torch.float64).cpu()
    found: Array = total.numpy()
    return found


def not_finite(layer: int, expert: int, what: str = "inputs") -> CheckpointError:
    """Error for an expert's inputs or outputs that overflow."""
    return CheckpointError(
        f"{what} of expert {expert} of layer {layer} are not finite",
        "the weights are damaged, or the model overflows in the dtype of its config.json",
    )
