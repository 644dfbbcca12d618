"""Blocks of ggml: every type on every level is bit for bit what the package gguf decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktconv import native
from ktconv.checkpoint.elements import BLOCKS

pytest.importorskip("gguf")

from helpers.ggml import F32, U8, blocks_of, values_of

ROWS = 32


def matrix(name: str, blocks: U8, cols: int, **details: Any) -> native.Matrix:
    units = blocks.shape[1] // BLOCKS[name].unit_bytes
    return native.Matrix(blocks.reshape(-1), name, len(blocks), cols, row_stride=units, **details)


def same_bits(found: F32, expected: F32) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.copy().view(np.uint32))


@pytest.mark.parametrize("name", BLOCKS)
def test_values(isa: str, name: str) -> None:
    """Rows of 1 to 5 blocks, from every place where they may be cut, to any other."""
    rng = np.random.default_rng(len(name))
    wide = BLOCKS[name].unit_cols
    for count in (1, 2, 5):
        blocks = blocks_of(rng, name, 3, count * wide)
        values = values_of(name, blocks)
        for first in range(0, wide, 32):
            for cols in range(32, count * wide - first + 1, 32 if count == 2 else wide):
                found = native.decode(matrix(name, blocks, cols, first_col=first))
                same_bits(found, values[:, first : first + cols])
