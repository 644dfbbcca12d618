"""Source matrices: strides and scales of their stored elements, and their values as floats."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check, expect_rows

_DTYPES = (
    "BF16", "F16", "F32", "F8_E4M3", "F4_E2M1", "I8", "U4_AWQ",
    "U2", "U3", "U4", "U5", "U6", "U7", "U8",
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "I4", "F4_E0M3",
    "F6_E2M3",
)  # fmt: skip
DTYPES: dict[str, int] = {name: getattr(lib, f"KT_{name}") for name in _DTYPES}


@cache
def stored_unit(dtype: str) -> tuple[int, int, int]:
    """Bytes of a stored unit, and the rows and columns that it has; see kt_stored_unit."""
    unit = ffi.new("kt_stored_unit *")
    check(lib.kt_dtype_unit(DTYPES[dtype], unit))
    return unit.bytes, unit.rows, unit.cols


class Matrix:
    """A strided view of source weights; keeps the memory it points to alive.

    `buffer` is contiguous uint8 memory, `start` and the strides count stored units of `dtype`.
    `first_col` columns of the first unit of each row are before the matrix (blocks of ggml).
    `block_scale` is a float32 grid, with blocks of `block` = (rows, cols) and the matrix starting
    at element `origin` of the grid; `zero_point` is such a grid too. `group_of_col` (int32
    [cols]) names the grid's column for each of the matrix, instead of blocks. `row_scale` (float32
    [rows]): scales of integers that may be kept, see kt_matrix. Rows and columns are multiplied by
    `row_factor` (float32 [rows]) and `col_factor` (float32 [cols]).
    """

    def __init__(
        self,
        buffer: Array,
        dtype: str,
        rows: int,
        cols: int,
        *,
        start: int = 0,
        row_stride: int | None = None,
        col_stride: int = 1,
        first_col: int = 0,
        block_scale: Array | None = None,
        block: tuple[int, int] = (1, 1),
        origin: tuple[int, int] = (0, 0),
        zero_point: Array | None = None,
        group_of_col: Array | None = None,
        row_scale: Array | None = None,
        row_factor: Array | None = None,
        col_factor: Array | None = None,
        round_to_bf16: bool = False,
    ) -> None:
        size, unit_rows, unit_cols = stored_unit(dtype)
        units = -(-(first_col + cols) // unit_cols)
        row_stride = units if row_stride is None else row_stride
        last = start + (rows // unit_rows - 1) * row_stride + (units - 1) * col_stride
        if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous or start < 0:
            raise ValueError("buffer must be contiguous uint8, start must not be negative")
        if (last + 1) * size > buffer.nbytes:
            raise ValueError(f"[{rows}, {cols}] from unit {start} on exceeds the buffer")
        self.rows, self.cols = rows, cols
        self.c = ffi.new("kt_matrix *")
        self._keep = [buffer]
        self.c.data = ffi.from_buffer("char[]", buffer) + start * size
        self.c.rows, self.c.cols, self.c.dtype = rows, cols, DTYPES[dtype]
        self.c.row_stride, self.c.col_stride = row_stride, col_stride
        self.c.round_to_bf16, self.c.first_col = round_to_bf16, first_col
        self.row_scale = row_scale
        if row_scale is not None:
            self.c.row_scale = self._vector("row_scale", row_scale, rows)
        if row_factor is not None:
            self.c.row_factor = self._vector("row_factor", row_factor, rows)
        if col_factor is not None:
            self.c.col_factor = self._vector("col_factor", col_factor, cols)
        if block_scale is None:
            if zero_point is not None or group_of_col is not None:
                raise ValueError("zero_point and group_of_col need a block_scale")
            return
        if group_of_col is not None:
            self._set_groups(group_of_col, block_scale)
        self.c.block_scale = self._grid("block_scale", block_scale, block, origin)
        self.c.scale_stride = block_scale.shape[1]
        self.c.block_rows, self.c.block_cols = block
        self.c.row_origin, self.c.col_origin = origin
        if zero_point is not None:
            if zero_point.shape != block_scale.shape:
                raise ValueError(f"zero_point is {zero_point.shape}, not {block_scale.shape}")
            self.c.zero_point = self._grid("zero_point", zero_point, block, origin)

    def _vector(self, what: str, values: Array, length: int) -> Any:
        """float32 [length] for C."""
        expect_rows(what, values, np.float32, (length,))
        kept = np.require(values, requirements="A")
        self._keep.append(kept)
        return ffi.cast("float *", ffi.from_buffer(kept))

    def _grid(self, what: str, grid: Array, block: tuple[int, int], origin: tuple[int, int]) -> Any:
        """`grid` for C, if it covers the matrix."""
        if grid.dtype != np.float32 or grid.ndim != 2 or not grid.flags.c_contiguous:
            raise ValueError(f"{what} must be a contiguous 2-D float32 array")
        if min(block) < 1 or min(origin) < 0:
            raise ValueError(f"blocks of {block} from {origin} on are not a grid")
        needed = [
            (begin + length - 1) // size + 1
            for begin, length, size in zip(origin, (self.rows, self.cols), block, strict=True)
        ]
        if self.c.group_of_col:
            needed[1] = 1
        if grid.shape[0] < needed[0] or grid.shape[1] < needed[1]:
            raise ValueError(f"{what} is {grid.shape}, the matrix needs {tuple(needed)}")
        grid = np.require(grid, requirements="A")  # C reads whole floats
        self._keep.append(grid)
        return ffi.cast("float *", ffi.from_buffer(grid))

    def _set_groups(self, groups: Array, grid: Array) -> None:
        expect_rows("group_of_col", groups, np.int32, (self.cols,))
        if groups.min() < 0 or groups.max() >= grid.shape[1]:
            raise ValueError(f"group_of_col must be 0..{grid.shape[1] - 1}")
        groups = np.require(groups, requirements="A")
        self._keep.append(groups)
        self.c.group_of_col = ffi.cast("int32_t *", ffi.from_buffer(groups))


def decode(matrix: Matrix, out: Array | None = None) -> Array:
    """The matrix as float32 [rows, cols], in `out` if it is given."""
    if out is None:
        out = np.empty((matrix.rows, matrix.cols), np.float32)
    expect_rows("out", out, np.float32, (matrix.rows, matrix.cols))
    target = ffi.cast("float *", ffi.from_buffer(out, require_writable=True))
    check(lib.kt_decode(matrix.c, target))
    return out
