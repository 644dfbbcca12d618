"""Tensors of the source as float32, a few rows at a time: experts and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ktconv.checkpoint import PROJECTIONS, Checkpoint, ExpertMatrix, MoELayer, TensorRef
from ktconv.checkpoint.encodings import ENCODINGS
from ktconv.checkpoint.encodings.fp8 import FP8_BLOCK
from ktconv.checkpoint.others import other_matrix
from ktconv.errors import CheckpointError
from ktconv.moe.streamed import Piece, Streamed, Streams
from ktconv.reading.matrices import MatrixReader, chunk_rows
from ktconv.reading.reader import BOUNCE_BYTES, SourceReader

F32 = NDArray[np.float32]


class SourceTensors:
    """Reads tensors of a checkpoint by name or expert."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._others = {tensor.name: tensor for tensor in checkpoint.other_tensors}

    def find(self, names: Iterable[str]) -> TensorRef | None:
        """The first of these non-expert tensors that is there."""
        return next((self._others[name] for name in names if name in self._others), None)

    def expert(self, layer: MoELayer, expert: int) -> Streams:
        """Gate, up and down of one expert."""
        matrices = layer.experts[expert]
        gate, up, down = (self._streamed(matrices[proj]) for proj in PROJECTIONS)
        return gate, up, down

    def matrix(self, tensor: TensorRef) -> Streamed:
        """A non-expert matrix, or a vector as its only row, of an encoding that experts may have.

        Raises CheckpointError for another encoding.
        """
        scale = self._others.get(f"{tensor.name}_scale_inv")
        if (tensor.dtype in FP8_BLOCK.dtypes) != (scale is not None):
            state = "has" if scale else "lacks"
            raise CheckpointError(f"{tensor.name} is {tensor.dtype} and {state} block scales")
        known = any(tensor.dtype in encoding.dtypes for encoding in ENCODINGS)
        if not known or len(tensor.shape) not in (1, 2):
            shape = list(tensor.shape)
            raise CheckpointError(
                f"{tensor.name} is {tensor.dtype} {shape}, which is not supported"
            )
        return self._streamed(other_matrix(self._checkpoint, tensor, scale))

    def vector(self, tensor: TensorRef) -> F32:
        """A non-expert tensor of one dimension."""
        values: F32 = self.matrix(tensor).values()[0]
        return values

    def _streamed(self, matrix: ExpertMatrix) -> Streamed:
        return Streamed(matrix.rows, matrix.cols, lambda: self._pieces(matrix))

    def _pieces(self, matrix: ExpertMatrix) -> Iterator[Piece]:
        source = MatrixReader(self._reader, matrix)
        rows = min(chunk_rows(matrix), matrix.rows)
        buffer = np.empty(matrix.nbytes(rows), np.uint8)
        bounce = np.empty(BOUNCE_BYTES, np.uint8)
        for chunk, values in source.decoded(buffer, bounce):
            yield Piece(slice(chunk.start, chunk.stop), slice(0, matrix.cols), values)
