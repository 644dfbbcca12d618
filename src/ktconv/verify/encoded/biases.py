"""Biases of encoded experts, which are the source's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ktconv.source import ExpertMatrix
from ktconv.source.encodings.base import BIAS
from ktconv.source.reading.matrices import MatrixReader
from ktconv.system.arrays import F32, U8
from ktconv.verify.encoded.output import Module
from ktconv.verify.reading import Context, TensorStream, read_tensor
from ktconv.verify.second_reader.numbers import ITEMS, floats


def bias_of(module: Module) -> F32 | None:
    """The values of a module's bias, if it has one."""
    tensor = module.parts.get(BIAS)
    return None if tensor is None else _values(read_tensor(tensor), tensor.dtype)


def compare_bias(
    context: Context, module: Module, matrix: ExpertMatrix, streams: Mapping[str, TensorStream]
) -> None:
    """A failure where it is not the source's. What is missing, or of another dtype or shape, is
    reported by level structure."""
    tensor = module.parts.get(BIAS)
    if tensor is None or matrix.bias is None or context.reader is None:
        return
    if tensor.dtype != matrix.bias.number or tensor.shape != (matrix.rows,):
        return
    found = _values(streams[BIAS].read(np.empty(tensor.nbytes, np.uint8)), tensor.dtype)
    expected = MatrixReader(context.reader, matrix).load_bias()
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        words = f"differs from the source's biases in {wrong.size} rows, first in row {wrong[0]}"
        context.findings.fail_tensor(
            "weights", "bias", tensor.name, tensor.file, words, **module.at
        )


def _values(data: U8, dtype: str) -> F32:
    return floats(data.view(ITEMS[dtype]), dtype)
