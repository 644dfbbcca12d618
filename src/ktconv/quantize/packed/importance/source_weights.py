"""Weights of squared errors that follow from the model alone (`--importance weights`).

Inputs of gate and up are the outputs of a norm: of mean square n_c^2 in channel c, if n are the
weights of the norm and what goes into it is alike in all channels. An input of down is the product
of an output of up and the activation of one of gate, and these have mean squares that grow with
those of their rows: with u_i and g_i row i of up and gate,

    v_c = n_c^2 for gate and up
    v_i = sum((u_i n)^2) sum((g_i n)^2) for down; of experts without a gate sum((u_i n)^2), and its
          square where they square it (relu2)

docs/calibration.md has what this gains.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv import native
from ktconv.conversion.tasks import Advance
from ktconv.errors import CheckpointError
from ktconv.quantize.packed.folding import FoldTask
from ktconv.quantize.packed.importance.channel_weights import normalised
from ktconv.quantize.packed.task import QuantizeTask
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer, Projection
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import ROWS_STEP, MatrixReader, Scales, buffer_bytes, chunk_rows
from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader, Span
from ktconv.source.reading.tensors import SourceTensors, find_norm, norm_scale
from ktconv.system.arrays import F32, F64, I64, U8, Array
from ktconv.system.units import listed
from ktconv.targets.packed.target import BY_WEIGHTS
from ktconv.writer.staging import Staging

_TOGETHER = 8  # threads that add up squares at a time, each with buffers of its own
_KEPT = 64  # experts whose weights of down are kept


class NormWeights(Struct, frozen=True):
    """Weights of one layer that follow from its norm alone."""

    gate_up: F32 | None  # [H]; None: all errors count the same

    def of(self, expert: int, projection: Projection) -> F32 | None:
        """[inputs]; None of down, too, whose weights `SourceWeights.of` computes."""
        return None if projection == "down" else self.gate_up


class SourceWeights:
    """Weights of some layers of a checkpoint; the same interface as that of a file's."""

    record = BY_WEIGHTS
    coverage: Mapping[int, I64] = {}  # no text, and so no tokens

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[MoELayer]) -> None:
        """Reads the norms. CheckpointError for a NaN or an infinity in one."""
        self._layers = {layer.index: layer for layer in layers}
        self._reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._norms = _norms(checkpoint, layers)
        self.notes = _notes([layer.index for layer in layers if layer.index not in self._norms])
        self._gate_up = {
            index: normalised(np.square(norm, dtype=np.float64))
            for index, norm in self._norms.items()
        }
        self._down = lru_cache(_KEPT)(self._compute_down)
        self._places = threading.BoundedSemaphore(_TOGETHER)

    def layer(self, index: int) -> NormWeights:
        """Weights that are known before matrices are read."""
        return NormWeights(self._gate_up.get(index))

    def of(self, layer: int, expert: int, projection: Projection) -> F32 | None:
        """[inputs of this matrix] of mean 1; None: all count the same. For use from several
        threads. Reads up and gate for those of down; CheckpointError for a NaN or an infinity."""
        if projection == "down":
            return self._down(layer, expert)
        return self._gate_up.get(layer)

    def memory(self, layers: int) -> int:
        """Bytes, of any number of layers."""
        kept = sum(2 * norm.nbytes for norm in self._norms.values())
        kept += 4 * _KEPT * max(layer.intermediate_size for layer in self._layers.values())
        matrices = (matrix for layer in self._layers.values() for matrix in layer.kinds)
        return kept + _TOGETHER * max(map(squares_memory, matrices))

    def _compute_down(self, layer: int, expert: int) -> F32 | None:
        matrices = self._layers[layer].experts[expert]
        norm = self._norms.get(layer)
        if norm is None:
            norm = np.ones(matrices["up"].cols, np.float32)
        with self._places:
            squares = row_squares(self._reader, matrices["up"], norm)
            if "gate" in matrices:
                squares = squares * row_squares(self._reader, matrices["gate"], norm)
        if self._layers[layer].activation.function == "relu2":
            squares = squares * squares
        return normalised(squares)


def _norms(checkpoint: Checkpoint, layers: Sequence[MoELayer]) -> dict[int, F32]:
    """Factors by which each layer's norm multiplies the experts' inputs, [H]; without those of
    other widths, as where inputs are latent, and those that cannot be read or are 0."""
    tensors, config = SourceTensors(checkpoint), checkpoint.config
    found = {}
    for layer in layers:
        norm = find_norm(tensors, config, layer)
        if norm is None or norm.shape != (layer.hidden_size,):
            continue
        scale = norm_scale(tensors, config, layer, norm)
        if not np.isfinite(scale).all():
            raise CheckpointError(
                f"tensor {norm.name} in {norm.file} contains a NaN or an infinity",
                "download the file again; if the original contains it, convert without "
                "--importance weights",
            )
        if scale.any():
            found[layer.index] = scale
    return found


def _notes(without: list[int]) -> list[str]:
    if not without:
        return []
    return [
        f"{listed('layer', without)}: no known norm before the experts: all errors of "
        "gate and up count the same there, and those of down by the rows of up and gate alone"
    ]


class WeighedTask(Struct, frozen=True):
    """Converts down, alone or folded with up, with weights that its worker computes."""

    task: QuantizeTask | FoldTask
    weights: SourceWeights

    @property
    def source_bytes(self) -> int:
        return self.task.source_bytes

    def spans(self) -> Sequence[Span]:
        return self.task.spans()

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        if isinstance(self.task, FoldTask):
            folded = replace(self.task, down=self._weighed(self.task.down))
            return folded.run(staging, buffers, advance)
        return self._weighed(self.task).run(staging, buffers, advance)

    def _weighed(self, down: QuantizeTask) -> QuantizeTask:
        found = self.weights.of(down.layer.index, down.expert, "down")
        return replace(down, importance=found)


# ---- squares of rows -----------------------------------------------------------------------


_LANES = 512  # columns that are added up apart; whole units of every encoding
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # of sums in binary32; others are added up in binary64


def row_squares(reader: SourceReader, matrix: ExpertMatrix, factors: F32) -> F64:
    """Sums over c of (w[i, c] factors[c])^2, [rows]; `factors`: [cols]. CheckpointError for a NaN
    or an infinity.

    A sum is that of every 512th column from the first on, and then of the two halves of these 512
    sums, of their halves, and so on. Each of those additions is of whole arrays: NumPy has no order
    of its own to choose.
    """
    source = MatrixReader(reader, matrix)
    data = np.empty(buffer_bytes(matrix, _rows(matrix)), np.uint8)
    bounce = np.empty(BOUNCE_BYTES, np.uint8)
    sums = np.empty(matrix.rows, np.float64)
    with source.open() as fd:
        scales = source.load_scales()
        for start in range(0, matrix.rows, _rows(matrix)):
            chunk = range(start, min(start + _rows(matrix), matrix.rows))
            source.read(fd, chunk, data, bounce)
            sums[chunk.start : chunk.stop] = _of_chunk(source, scales, chunk, data, factors)
    return sums


def squares_memory(matrix: ExpertMatrix) -> int:
    """Bytes that `row_squares` needs."""
    rows = _rows(matrix)
    return buffer_bytes(matrix, rows) + BOUNCE_BYTES + 8 * 4 * rows * _LANES + 16 * matrix.rows


def _rows(matrix: ExpertMatrix) -> int:
    """Rows of a chunk: few, so that lanes stay in the cache, but for a matrix that is gathered from
    many short runs."""
    return min(ROWS_STEP if matrix.col_stride == 1 else chunk_rows(matrix), matrix.rows)


def _of_chunk(
    source: MatrixReader, scales: Scales | None, chunk: range, data: U8, factors: F32
) -> F64:
    """[rows of the chunk]"""
    with np.errstate(over="ignore", under="ignore"):
        sums = _added(source, scales, chunk, data, factors)
        if ((sums >= _SMALLEST) & (sums <= _LARGEST)).all():
            return sums.astype(np.float64)
    sums = _added(source, scales, chunk, data, factors.astype(np.float64))
    if not np.isfinite(sums).all():
        _refuse(source, scales, chunk, data)
    return sums.astype(np.float64)


def _added(
    source: MatrixReader, scales: Scales | None, chunk: range, data: U8, factors: Array
) -> Array:
    """Sums in the precision of `factors`."""
    lanes = np.zeros((len(chunk), _LANES), factors.dtype)
    for first in range(0, len(factors), _LANES):
        cols = min(_LANES, len(factors) - first)
        view = source.view(chunk, scales, data, first, cols)
        terms: Array = native.decode(view).astype(factors.dtype, copy=False)
        terms *= factors[first : first + cols]
        terms *= terms
        lanes[:, :cols] += terms
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _refuse(source: MatrixReader, scales: Scales | None, chunk: range, data: U8) -> None:
    """CheckpointError for the first value that is not finite."""
    view = source.view(chunk, scales, data, 0, source.matrix.cols)
    source.finite(native.decode(view), chunk.start)
