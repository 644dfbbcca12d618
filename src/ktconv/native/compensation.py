"""Choosing codes column by column with compensated errors; see kt_compensate."""

from __future__ import annotations

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check, expect_rows

BLOCK_COLS: int = lib.KT_COMPENSATE_COLS


def compensate(
    max_level: int, weights: Array, factor: Array, step: Array, group_of_col: Array, loss: Array
) -> tuple[Array, Array]:
    """Codes int8 [B, N] of the next B <= BLOCK_COLS columns, and errors float32 [B, N] over the
    factor's diagonal, by which the caller changes the columns behind them.

    `weights`: float32 [B, N], a column of N rows each, which may be apart. `factor`: float32
    [B, B], upper triangular. `step`: float32 [G, N], between two codes. `group_of_col`: int32 [B].
    `loss`: float64 [N], to which the squares of errors are added. ValueError for others.
    """
    cols, rows = weights.shape
    if weights.dtype != np.float32 or (rows > 1 and weights.strides[1] != 4):
        raise ValueError("weights must be float32, the rows of a column side by side")
    if weights.strides[0] % 4 or weights.strides[0] < 4 * rows:
        raise ValueError("columns of weights must not overlap")
    expect_rows("factor", factor, np.float32, (cols, cols))
    expect_rows("step", step, np.float32, (step.shape[0], rows))
    expect_rows("group_of_col", group_of_col, np.int32, (cols,))
    expect_rows("loss", loss, np.float64, (rows,))
    codes, errors = np.empty((cols, rows), np.int8), np.empty((cols, rows), np.float32)
    status = lib.kt_compensate(
        max_level,
        rows,
        cols,
        ffi.cast("float *", weights.ctypes.data),
        weights.strides[0] // 4,
        ffi.cast("float *", ffi.from_buffer(factor)),
        ffi.cast("float *", ffi.from_buffer(step)),
        step.shape[0],
        ffi.cast("int32_t *", ffi.from_buffer(group_of_col)),
        ffi.cast("int8_t *", ffi.from_buffer(codes)),
        ffi.cast("float *", ffi.from_buffer(errors)),
        ffi.cast("double *", ffi.from_buffer(loss, require_writable=True)),
    )
    check(status)
    return codes, errors
