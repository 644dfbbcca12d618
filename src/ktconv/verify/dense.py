"""Tensors of the source as float32: whole expert matrices, and what stands beside the experts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import PROJECTIONS, Checkpoint, MoELayer, Projection, TensorRef
from ktconv.errors import CheckpointError
from ktconv.formats.decode import bf16_to_f32, e4m3fn_to_f32, f16_to_f32, fp8_block_to_f32
from ktconv.matrix_reader import ITEM_SIZE, MatrixReader, chunk_rows, chunks
from ktconv.moe.experts import Matrices
from ktconv.source import BOUNCE_BYTES, SourceReader

F32 = NDArray[np.float32]

_FP8_BLOCK = 128  # where config.json does not say


class SourceTensors:
    """Reads tensors of a checkpoint by name or expert."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._others = {tensor.name: tensor for tensor in checkpoint.other_tensors}

    def has(self, name: str) -> bool:
        """Whether a non-expert tensor of that name is there."""
        return name in self._others

    def first(self, names: Iterable[str]) -> F32 | None:
        """The first of these tensors that exists."""
        for name in names:
            if name in self._others:
                return self.read(name)
        return None

    def read(self, name: str) -> F32:
        """A non-expert tensor of any encoding that experts may have."""
        tensor = self._others.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._checkpoint.path} lacks {name}")
        data = self._bytes(tensor)
        if tensor.dtype == "BF16":
            return bf16_to_f32(data.view(np.uint16)).reshape(tensor.shape)
        if tensor.dtype == "F16":
            return f16_to_f32(data.view(np.uint16)).reshape(tensor.shape)
        if tensor.dtype == "F32":
            return data.view(np.float32).reshape(tensor.shape)
        if tensor.dtype == "F8_E4M3":
            return self._fp8(name, data.reshape(tensor.shape))
        raise CheckpointError(f"{name} is {tensor.dtype}, which ktconv does not read here")

    def _fp8(self, name: str, codes: NDArray[np.uint8]) -> F32:
        if f"{name}_scale_inv" not in self._others:
            return e4m3fn_to_f32(codes)
        about = self._checkpoint.config.get("quantization_config") or {}
        rows, cols = about.get("weight_block_size") or (_FP8_BLOCK, _FP8_BLOCK)
        return fp8_block_to_f32(codes, self.read(f"{name}_scale_inv"), (rows, cols))

    def _bytes(self, tensor: TensorRef) -> NDArray[np.uint8]:
        data = np.empty(tensor.nbytes, np.uint8)
        with self._reader.open(tensor.file) as fd:
            self._reader.read(fd, tensor, data.data, 0)
        return data

    def expert(self, layer: MoELayer, expert: int) -> Matrices:
        """Gate, up and down of one expert."""
        gate, up, down = (self._matrix(layer, expert, proj) for proj in PROJECTIONS)
        return gate, up, down

    def _matrix(self, layer: MoELayer, expert: int, proj: Projection) -> F32:
        matrix = layer.experts[expert][proj]
        source = MatrixReader(self._reader, matrix)
        rows = min(chunk_rows(matrix), matrix.rows)
        buffer = np.empty(rows * matrix.cols * ITEM_SIZE[matrix.tensor.dtype], np.uint8)
        bounce = np.empty(BOUNCE_BYTES, np.uint8)
        out = np.empty((matrix.rows, matrix.cols), np.float32)
        with source.open() as fd:
            grid = source.load_scales()
            for chunk in chunks(matrix, matrix.rows):
                source.read(fd, chunk, buffer, bounce)
                view = source.view(chunk, grid, buffer, 0, matrix.cols)
                out[chunk.start : chunk.stop] = native.decode(view)
        return out
