"""Second moments of the inputs of each expert's matrices: X^T X over its tokens.

A token's row of X is multiplied by the weight that the router gives the expert for it: errors of
the expert's output count in the layer's as much.

DIR has a safetensors file per layer, layer-00003.safetensors, with for each expert E that got
tokens, of hidden size H and intermediate size I

    experts.E.gate_up   float32 [H (H + 1) / 2]   of gate_proj and up_proj, which share inputs
    experts.E.down      float32 [I (I + 1) / 2]   of down_proj: activated intermediates
    counts              int64 [experts]           tokens that each expert got
    gate_up.diagonal    float32 [experts, H]      the diagonals of these matrices
    down.diagonal       float32 [experts, I]

A matrix is symmetric: only its upper triangle is stored, row by row. It is the sum over the tokens,
not the mean. docs/calibration.md describes the metadata.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ktconv.errors import OutputError, UsageError
from ktconv.source import Projection
from ktconv.source.config import MAX_SIZE
from ktconv.stats.importance import not_finite
from ktconv.stats.origin import Origin, Sizes
from ktconv.stats.stored import StatisticsFile
from ktconv.system.arrays import F32, I64, Array
from ktconv.system.files import is_there, make_directory
from ktconv.writer.shards import Tensor as Planned
from ktconv.writer.shards import plan_shard
from ktconv.writer.staging import ShardStaging

if TYPE_CHECKING:
    from torch import Tensor

KIND = "ktconv-hessian"
VERSION = 2  # 1 had no diagonals, and tokens that all count the same
OPTION = "--hessian DIR"
_NAME = re.compile(r"layer-([0-9]{5,9})\.safetensors")
# A band of so many rows of a matrix, and so many tokens, are in memory at a time: for a hidden size
# of 8192, 17 and 67 MB.
_BAND, _TOKENS = 512, 2048


# ---- reading ---------------------------------------------------------------------------


class Hessians:
    """An opened DIR: `layers` ascend. Matrices are read when they are asked for."""

    def __init__(self, files: Mapping[int, StatisticsFile]) -> None:
        self._files = files
        self.layers = tuple(sorted(files))
        self.origin = files[self.layers[0]].origin
        self.sizes = {layer: _sizes(files[layer]) for layer in self.layers}
        self._counts = {layer: _counts(files[layer], self.sizes[layer]) for layer in self.layers}

    def counts(self, layer: int) -> I64:
        """Tokens [E] that each expert of a layer got."""
        return self._counts[layer]

    def diagonal(self, layer: int, projection: Projection) -> F32:
        """Diagonals of the matrices of all experts of a layer: [E, inputs]. Raises as `matrix`."""
        file, sizes = self._files[layer], self.sizes[layer]
        kind, size = _kinds(sizes)[projection == "down"]
        found: F32 = file.array(f"{kind}.diagonal", "F32", sizes.experts, size)
        if not np.isfinite(found).all() or (found < 0).any():
            raise file.damaged(f"tensor {kind}.diagonal has values that no sum of squares has")
        if found[self._counts[layer] == 0].any():
            raise file.damaged(f"tensor {kind}.diagonal has values of experts without tokens")
        return found

    def matrix(self, layer: int, expert: int, projection: Projection) -> F32:
        """X^T X [inputs, inputs] of the inputs of a projection; zeros for an expert without tokens.

        Raises UsageError for values that are not finite, or not of a second moment (negative on
        the diagonal), or have another diagonal than `diagonal`, by which scales are chosen;
        ResourceError where the system refuses to read.
        """
        file, sizes = self._files[layer], self.sizes[layer]
        kind, size = _kinds(sizes)[projection == "down"]
        if not self._counts[layer][expert]:
            return np.zeros((size, size), np.float32)
        name = _name(expert, kind)
        packed: F32 = file.array(name, "F32", _packed_size(size))
        if not np.isfinite(packed).all():
            raise file.damaged(f"tensor {name} has values that are not finite")
        matrix = unpacked(packed, size)
        if (matrix.diagonal() < 0).any():
            raise file.damaged(f"tensor {name} has a negative value on its diagonal")
        if (matrix.diagonal() != self.diagonal(layer, projection)[expert]).any():
            raise file.damaged(f"tensor {name} has another diagonal than {kind}.diagonal says")
        return matrix


def open_hessians(directory: str | Path) -> Hessians:
    """Open the output of `ktconv stats --hessian`: headers and counts are read, and checked.

    Raises UsageError for a directory without such files, or with damaged ones, or of several runs;
    ResourceError where the system refuses.
    """
    found = _files(Path(directory))
    if not found:
        raise UsageError(
            f"{directory} has no files of ktconv stats {OPTION}",
            f"record some with: ktconv stats MODEL {OPTION}",
        )
    files = {layer: _opened(path, layer) for layer, path in sorted(found.items())}
    first, *others = files.values()
    for other in others:
        if other.origin != first.origin:
            raise UsageError(
                f"{other.path} and {first.path.name} are of different models or texts",
                f"record them again, in an empty directory: ktconv stats MODEL {OPTION}",
            )
    return Hessians(files)


def _files(directory: Path) -> dict[int, Path]:
    """The files of layers, by their number. UsageError if it is no directory."""
    if not directory.is_dir():
        what = "is not a directory" if is_there(directory) else "does not exist"
        raise UsageError(f"{directory} {what}", f"give the DIR of ktconv stats MODEL {OPTION}")
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _opened(path: Path, layer: int) -> StatisticsFile:
    file = StatisticsFile(path, KIND, OPTION, VERSION)
    if file.number("layer") != layer:
        raise file.damaged(f"it is of layer {file.number('layer')}")
    return file


def _sizes(file: StatisticsFile) -> Sizes:
    keys = ("experts", "hidden_size", "intermediate_size")
    sizes = Sizes(*(file.number(key) for key in keys))
    if not all(0 < size <= MAX_SIZE for size in (sizes.experts, sizes.hidden, sizes.intermediate)):
        raise file.damaged("sizes in its metadata are impossible")
    return sizes


def _counts(file: StatisticsFile, sizes: Sizes) -> I64:
    counts: I64 = file.array("counts", "I64", sizes.experts)
    if (counts < 0).any():
        raise file.damaged("tensor counts has negative values")
    for kind, size in _kinds(sizes):
        file.check(f"{kind}.diagonal", "F32", sizes.experts, size)
    for expert in np.flatnonzero(counts):
        for name, size in _matrices(int(expert), sizes):
            file.check(name, "F32", _packed_size(size))
    return counts


def unpacked(packed: F32, size: int) -> F32:
    """The symmetric matrix [size, size] whose upper triangle `packed` has, row by row."""
    matrix, start = np.empty((size, size), np.float32), 0
    for row in range(size):
        matrix[row, row:] = packed[start : start + size - row]
        start += size - row
    for row in range(0, size, _BAND):  # block by block, as whole columns miss the cache
        end = row + _BAND
        block = np.triu(matrix[row:end, row:end])
        matrix[row:end, row:end] = block + np.triu(block, 1).T
        matrix[end:, row:end] = matrix[row:end, end:].T
    return matrix


def _file_name(layer: int) -> str:
    return f"layer-{layer:05}.safetensors"


def _kinds(sizes: Sizes) -> tuple[tuple[str, int], tuple[str, int]]:
    """The two kinds of matrices, and their sizes."""
    return ("gate_up", sizes.hidden), ("down", sizes.intermediate)


def _name(expert: int, kind: str) -> str:
    return f"experts.{expert}.{kind}"


def _matrices(expert: int, sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Name and size of each matrix of an expert."""
    for kind, size in _kinds(sizes):
        yield _name(expert, kind), size


def _packed_size(size: int) -> int:
    return size * (size + 1) // 2


# ---- writing ---------------------------------------------------------------------------


def nbytes(sizes: Sizes) -> int:
    """Bytes of a layer whose experts all get tokens."""
    return 4 * sizes.experts * sum(_packed_size(size) + size for _, size in _kinds(sizes))


def memory(layers: Mapping[int, Sizes]) -> int:
    """Bytes that a `HessianTap` takes."""
    widest = max(max(one.hidden, one.intermediate) for one in layers.values())
    return 3 * 4 * widest * (_BAND + _TOKENS)


class HessianTap:
    """Writes the second moments of `layers` to a directory, each layer's file when it is done.

    Files of the same origin that are there already are kept: so a later run goes on. OutputError
    for a directory with files of another origin, or that cannot be read. Memory is that of a band
    of one matrix.
    """

    wants_inputs = True

    def __init__(self, layers: Mapping[int, Sizes], origin: Origin, directory: Path) -> None:
        self._layers, self._origin, self._directory = layers, origin, directory
        self.kept = _kept(directory, layers, origin)
        self._passed: list[int] = []  # of `layers`
        self._experts: set[int] = set()  # that were chosen in this layer
        self._counts: I64 = np.zeros(0, np.int64)
        self._staging: ShardStaging | None = None

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be written, at most."""
        return sum(nbytes(one) for layer, one in self._layers.items() if layer not in self.kept)

    def _wants(self, layer: int) -> bool:
        return layer in self._layers and layer not in self.kept

    def chosen(self, layer: int, window: int, ids: Tensor, weights: Tensor) -> None:
        if self._wants(layer):
            self._experts.update(int(expert) for expert in np.unique(ids.cpu().numpy()))

    def inputs(self, layer: int, expert: int, rows: Tensor, inner: Tensor, weights: Tensor) -> None:
        """Write the matrices of an expert's tokens: inputs of gate and up [n, H], of down [n, I].
        CheckpointError where they are not finite."""
        if not self._wants(layer):
            return
        staging = self._staged(layer)
        for (kind, size), values in zip(_kinds(self._layers[layer]), (rows, inner), strict=True):
            offset, start = 0, 4 * size * expert
            for piece, diagonal in _upper_triangle(values, weights):
                if not np.isfinite(piece).all():
                    raise not_finite(layer, expert)
                staging.write(_name(expert, kind), piece.data.cast("B"), offset)
                staging.write(f"{kind}.diagonal", diagonal.data.cast("B"), start)
                offset, start = offset + piece.nbytes, start + diagonal.nbytes
        self._counts[expert] = len(rows)

    def _staged(self, layer: int) -> ShardStaging:
        """The layer's file under a temporary name. Which experts it has is known: all choices come
        before the first expert."""
        if self._staging is None:
            sizes = self._layers[layer]
            self._counts = np.zeros(sizes.experts, np.int64)
            tensors = [Planned("counts", "I64", (sizes.experts,), 8 * sizes.experts)]
            for kind, size in _kinds(sizes):
                shape = sizes.experts, size
                tensors.append(Planned(f"{kind}.diagonal", "F32", shape, 4 * math.prod(shape)))
            for expert in sorted(self._experts - {-1}):
                for name, size in _matrices(expert, sizes):
                    packed = _packed_size(size)
                    tensors.append(Planned(name, "F32", (packed,), 4 * packed))
            metadata = self._origin.metadata(KIND, VERSION) | {
                "layer": str(layer),
                "experts": str(sizes.experts),
                "hidden_size": str(sizes.hidden),
                "intermediate_size": str(sizes.intermediate),
            }
            make_directory(self._directory)
            shard = plan_shard(_file_name(layer), tensors, metadata)
            self._staging = ShardStaging([shard], self._directory, self._directory)
        return self._staging

    def layer_done(self, layer: int) -> None:
        if self._wants(layer):
            staging = self._staged(layer)
            staging.write("counts", self._counts.data.cast("B"), 0)
            staging.commit()
            self.kept.add(layer)
        if layer in self._layers:
            self._passed.append(layer)
        self._staging = None
        self._experts.clear()

    def close(self) -> None:
        """Remove what a layer that is not done has written."""
        if self._staging is not None:
            self._staging.abandon()
            self._staging = None

    def state(self) -> Mapping[str, Array]:
        """The layers that are not run again, whose files are there."""
        return {"layers": np.array(self._passed, np.int64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """OutputError where the file of such a layer is gone."""
        self._passed = [int(layer) for layer in state["layers"]]
        lost = [layer for layer in self._passed if layer not in self.kept]
        if lost:
            raise OutputError(
                f"{self._directory / _file_name(lost[0])}, which the interrupted run wrote, is "
                "missing",
                "put it back, or start again with another --work-dir DIR",
            )


def _kept(directory: Path, layers: Mapping[int, Sizes], origin: Origin) -> set[int]:
    """Layers whose files are there. OutputError for those of another origin or sizes."""
    if not directory.exists():
        return set()
    found = _files(directory)
    for layer, path in sorted(found.items()):
        try:
            file = _opened(path, layer)
            same = file.origin == origin and _sizes(file) == layers.get(layer, _sizes(file))
        except UsageError as error:
            raise OutputError(str(error), f"remove {path}, or choose another directory") from error
        if not same:
            raise OutputError(
                f"{path} is of another model, text or version",
                f"choose another directory, or remove the files of {directory}",
            )
    return set(found)


def _upper_triangle(values: Tensor, weights: Tensor) -> Iterator[tuple[F32, F32]]:
    """Pieces of the upper triangle of X^T X, row by row, and of its diagonal; the rows of X are
    those of `values` [n, channels] times `weights` [n]."""
    import torch

    size = values.shape[1]
    for start in range(0, size, _BAND):
        rows = min(_BAND, size - start)
        band = torch.zeros((rows, size - start), dtype=torch.float32, device=values.device)
        for first in range(0, len(values), _TOKENS):
            some = slice(first, first + _TOKENS)
            x = values[some, start:].detach().float() * weights[some, None].float()
            band.addmm_(x[:, :rows].T, x)
        found = band.cpu().numpy()
        triangle = np.concatenate([found[row, row:] for row in range(rows)])
        yield triangle, np.ascontiguousarray(found.diagonal())
