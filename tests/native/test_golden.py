"""The C library against the bytes that the reference wrote."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import golden
from native.support import F32, U8

from ktconv import native
from ktconv.formats import PROJECTIONS, is_backward, matrix_shape, split


def pack(fmt: str, matrix: native.Matrix) -> tuple[U8, F32]:
    packed = np.empty(native.packed_size(fmt, matrix.rows, matrix.cols), np.uint8)
    scale = np.empty(matrix.rows, np.float32)
    native.quantize_pack(fmt, matrix, packed, scale)
    return packed, scale


def check(case: golden.Case, item: golden.Item, matrix: native.Matrix) -> None:
    packed, scale = pack(case.format.key, matrix)
    case.check(item.key("weight"), packed.tobytes())
    case.check(item.key("scale"), scale.tobytes())


@pytest.mark.parametrize("case", golden.PARAMS)
def test_views_of_the_whole_matrix(isa: str, case: golden.Case) -> None:
    """As a conversion does it: rows, column slices and transposes are strides only."""
    for item in case.matrices():
        forward = PROJECTIONS[["gate", "up", "down"].index(item.proj.removesuffix("_bwd"))]
        _, cols = matrix_shape(item.proj, case.hidden, case.intermediate)
        part = split(item.proj, case.hidden, case.intermediate, item.part, case.parts)
        rows, width = part.shape
        buffer = case.source(item.expert, forward).reshape(-1).view(np.uint8)
        start = part.row_start * cols + part.col_start
        if is_backward(item.proj):
            matrix = native.Matrix(
                buffer, "BF16", width, rows, start=start, row_stride=1, col_stride=cols
            )
        else:
            matrix = native.Matrix(buffer, "BF16", rows, width, start=start, row_stride=cols)
        check(case, item, matrix)


@pytest.mark.parametrize("case", golden.PARAMS)
def test_copies(isa: str, case: golden.Case) -> None:
    for item in case.matrices():
        buffer = item.bf16.reshape(-1).view(np.uint8)
        check(case, item, native.Matrix(buffer, "BF16", *item.bf16.shape))
