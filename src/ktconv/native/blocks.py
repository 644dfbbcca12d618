"""Blocks of ggml, as GGUF files have them: encoding a matrix, and comparing the result."""

from __future__ import annotations

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, byte_pointer, check, expect_bytes, expect_rows
from ktconv.native.encoding import EncodedAudit
from ktconv.native.packing import new_scratch
from ktconv.native.source import DTYPES, Matrix, stored_unit

BLOCK_TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")  # that are encoded


def blocks_bytes(dtype: str, rows: int, cols: int) -> int:
    """Bytes of a matrix [rows, cols] as blocks of `dtype`. ValueError for columns that are no whole
    blocks."""
    nbytes, _, block_cols = stored_unit(dtype)
    if cols % block_cols:
        raise ValueError(f"{cols} columns are no multiple of the {block_cols} of a {dtype} block")
    return rows * (cols // block_cols) * nbytes


def encode_blocks(
    dtype: str,
    matrix: Matrix,
    importance: Array | None = None,
    blocks: Array | None = None,
    scratch: Array | None = None,
) -> Array:
    """The matrix as uint8 blocks of one of BLOCK_TYPES, row after row, in `blocks` if it is given.

    `importance` (float32 [cols], 0 to 1e12): what squared errors of a column count; None: all the
    same. Raises NonFiniteError with the first NaN or Inf, ValueError for weights too large for the
    type's scales and for columns that are no whole blocks.
    """
    size = blocks_bytes(dtype, matrix.rows, matrix.cols)
    blocks = np.empty(size, np.uint8) if blocks is None else blocks
    expect_bytes("blocks", blocks, size)
    weights = ffi.NULL
    if importance is not None:
        expect_rows("importance", importance, np.float32, (matrix.cols,))
        weights = ffi.cast("float *", ffi.from_buffer(importance))
    scratch = new_scratch(matrix.cols) if scratch is None else scratch
    bad = ffi.new("kt_position *")
    status = lib.kt_encode_blocks(
        DTYPES[dtype],
        matrix.c,
        weights,
        byte_pointer(blocks, writable=True),
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
        bad,
    )
    check(status, bad)
    return blocks


def audit_blocks(dtype: str, source: Matrix, blocks: Array) -> EncodedAudit:
    """Compares blocks with their source; shares no code with `encode_blocks`.

    ValueError for shapes that it does not take, see kt_audit_blocks.
    """
    expect_bytes("blocks", blocks, blocks_bytes(dtype, source.rows, source.cols))
    found = ffi.new("kt_encoded_audit *")
    check(lib.kt_audit_blocks(DTYPES[dtype], source.c, byte_pointer(blocks), found))
    return EncodedAudit(*(getattr(found, name) for name in EncodedAudit._fields))
