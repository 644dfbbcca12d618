"""Levels layers and model for GGUF outputs: what their blocks decode to, since our kernels have no
code for most of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ktconv import native
from ktconv.formats.gguf import GGUF_FORMATS
from ktconv.source import MoELayer, Projection, TensorRef
from ktconv.source.reading.streamed import Piece, Streamed, piece_rows
from ktconv.system.arrays import U8
from ktconv.verify.dequantized_model import DequantizedLayersCheck, DequantizedModelCheck
from ktconv.verify.gguf.output import GgufOutput
from ktconv.verify.model import DEFAULTS
from ktconv.verify.reading import read_tensor


def dequantized(output: GgufOutput, layer: MoELayer, expert: int, proj: Projection) -> Streamed:
    """The values [rows, cols] of a matrix of an output that passed level structure."""
    matrix, bias = layer.experts[expert][proj], output.biases.get((layer.index, proj))
    pieces = partial(_pieces, output.experts[layer.index, proj], expert, matrix.rows, matrix.cols)
    return Streamed(
        matrix.rows,
        matrix.cols,
        pieces,
        None if bias is None else _read(bias, expert * matrix.rows, matrix.rows, 4).view("<f4"),
    )


def _pieces(tensor: TensorRef, expert: int, rows: int, cols: int) -> Iterator[Piece]:
    row_bytes, step = native.blocks_bytes(tensor.dtype, 1, cols), piece_rows(cols)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        data = _read(tensor, expert * rows + first, count, row_bytes)
        values = native.decode(native.Matrix(data, tensor.dtype, count, cols))
        yield Piece(slice(first, first + count), slice(0, cols), values)


def _read(tensor: TensorRef, first: int, count: int, row_bytes: int) -> U8:
    """Some rows, of all experts one behind the other."""
    return read_tensor(tensor, first * row_bytes, count * row_bytes)


class GgufLayersCheck(DequantizedLayersCheck):
    _dequantized = staticmethod(dequantized)


class GgufModelCheck(DequantizedModelCheck):
    _output: GgufOutput
    _dequantized = staticmethod(dequantized)

    @property
    def _bits(self) -> int:
        """The bits of thresholds: the next below that there are."""
        return max(one for one in DEFAULTS if one <= GGUF_FORMATS[self._output.method].bits)
