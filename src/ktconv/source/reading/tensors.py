"""Tensors of the source as float32, a few rows at a time: experts and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ktconv.errors import CheckpointError
from ktconv.families.names import is_gguf, norm_tensors
from ktconv.formats.decode import bf16_to_f32
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer, TensorRef
from ktconv.source.others import OtherWeights
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.source.reading.streamed import Piece, Streamed, Streams
from ktconv.source.settings import ModelSettings
from ktconv.system.arrays import F32, Array

_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}


class SourceTensors:
    """Reads tensors of a checkpoint by name or expert."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._others = OtherWeights(checkpoint)
        self._by_name = {tensor.name: tensor for tensor in checkpoint.other_tensors}
        self._aliases = checkpoint.aliases

    def find(self, names: Iterable[str]) -> TensorRef | None:
        """The first of these non-expert weights that is there: its primary tensor, with the shape
        of the weights."""
        own = (self._aliases.get(name, name) for name in names)  # where a map gives others
        found = next(filter(None, map(self._others.find, own)), None)
        return None if found is None else self._others.weight(found)

    def expert(self, layer: MoELayer, expert: int) -> Streams:
        """Gate, if there is one, up and down of one expert."""
        found = layer.experts[expert]
        gate = self._streamed(found["gate"]) if layer.gated else None
        return gate, self._streamed(found["up"]), self._streamed(found["down"])

    def matrix(self, tensor: TensorRef) -> Streamed:
        """A non-expert matrix that `find` found, or a vector as its only row.

        Raises CheckpointError for an encoding that experts cannot have.
        """
        parts = self._others.find(tensor.name)
        assert parts is not None, "find() found it"
        return self._streamed(self._others.matrix(parts).matrix)

    def vector(self, tensor: TensorRef) -> F32:
        """A non-expert tensor of one dimension."""
        values: F32 = self.matrix(tensor).values()[0]
        return values

    # ---- tensors that are no weights ----

    def find_plain(self, names: Iterable[str]) -> TensorRef | None:
        """The first of these non-expert tensors that is there, whatever its name ends in."""
        own = (self._aliases.get(name, name) for name in names)
        return next(filter(None, map(self._by_name.get, own)), None)

    def check_plain(self, tensor: TensorRef) -> None:
        """CheckpointError for a dtype that is neither plain numbers nor integers."""
        if tensor.dtype not in _PLAIN:
            raise CheckpointError(f"{tensor.name} is {tensor.dtype}, which is not supported")

    def plain(self, tensor: TensorRef) -> Array:
        """Integers of a tensor as int64 or its other numbers as float32, in its shape;
        CheckpointError where `check_plain` raises it."""
        self.check_plain(tensor)
        data = bytearray(tensor.nbytes)
        with self._reader.open(tensor.file) as fd:
            self._reader.read(fd, tensor, memoryview(data), 0)
        stored = np.frombuffer(data, _PLAIN[tensor.dtype]).reshape(tensor.shape)
        if tensor.dtype == "BF16":
            return bf16_to_f32(stored)
        return stored.astype(np.int64 if stored.dtype.kind == "i" else np.float32)

    def _streamed(self, matrix: ExpertMatrix) -> Streamed:
        bias = MatrixReader(self._reader, matrix).load_bias()
        return Streamed(matrix.rows, matrix.cols, lambda: self._pieces(matrix), bias)

    def _pieces(self, matrix: ExpertMatrix) -> Iterator[Piece]:
        source = MatrixReader(self._reader, matrix)
        for chunk, values in source.decoded():
            yield Piece(slice(chunk.start, chunk.stop), slice(0, matrix.cols), values)


def find_norm(tensors: SourceTensors, config: ModelSettings, layer: MoELayer) -> TensorRef | None:
    """Find the norm by its name; its shape may be any."""
    return tensors.find(norm_tensors(layer.source, config.family))


def norm_scale(
    tensors: SourceTensors, config: ModelSettings, layer: MoELayer, norm: TensorRef
) -> F32:
    """Factors of the norm for each channel, [width]. Some families store them less 1."""
    row = config.family
    less_one = row is not None and row.norm_less_one and not is_gguf(layer.source)
    scale: F32 = tensors.vector(norm) + np.float32(less_one)
    return scale
