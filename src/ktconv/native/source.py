"""Source matrices: where their elements lie, and what they are as floats."""

from __future__ import annotations

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check

DTYPES: dict[str, tuple[int, int]] = {  # safetensors name -> (kt_dtype, bytes per element)
    "BF16": (lib.KT_BF16, 2),
    "F16": (lib.KT_F16, 2),
    "F32": (lib.KT_F32, 4),
    "F8_E4M3": (lib.KT_F8_E4M3, 1),
}


class Matrix:
    """A strided view of source weights; keeps the memory it points to alive.

    `buffer` is contiguous uint8 memory, `start` and the strides count elements of
    `dtype` (a safetensors name). `block_scale` is a float32 grid for FP8, with blocks
    of `block` = (rows, cols) and the matrix starting at element `origin` of the grid.
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
        block_scale: Array | None = None,
        block: tuple[int, int] = (1, 1),
        origin: tuple[int, int] = (0, 0),
        round_to_bf16: bool = False,
    ) -> None:
        code, size = DTYPES[dtype]
        row_stride = cols if row_stride is None else row_stride
        last = start + (rows - 1) * row_stride + (cols - 1) * col_stride
        if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous or start < 0:
            raise ValueError("buffer must be contiguous uint8, start must not be negative")
        if (last + 1) * size > buffer.nbytes:
            raise ValueError(f"[{rows}, {cols}] from element {start} on exceeds the buffer")
        self.rows, self.cols = rows, cols
        self.c = ffi.new("kt_matrix *")
        self._keep = (buffer, block_scale)
        self.c.data = ffi.from_buffer("char[]", buffer) + start * size
        self.c.rows, self.c.cols, self.c.dtype = rows, cols, code
        self.c.row_stride, self.c.col_stride = row_stride, col_stride
        self.c.round_to_bf16 = round_to_bf16
        if block_scale is not None:
            self._set_scale(block_scale, block, origin)

    def _set_scale(self, grid: Array, block: tuple[int, int], origin: tuple[int, int]) -> None:
        if grid.dtype != np.float32 or grid.ndim != 2 or not grid.flags.c_contiguous:
            raise ValueError("block_scale must be a contiguous 2-D float32 array")
        if min(block) < 1 or min(origin) < 0:
            raise ValueError(f"blocks of {block} from {origin} on are not a grid")
        needed = [
            (begin + length - 1) // size + 1
            for begin, length, size in zip(origin, (self.rows, self.cols), block, strict=True)
        ]
        if grid.shape[0] < needed[0] or grid.shape[1] < needed[1]:
            raise ValueError(f"block_scale is {grid.shape}, the matrix needs {tuple(needed)}")
        grid = np.require(grid, requirements="A")  # C reads whole floats
        self._keep = (self._keep[0], grid)
        self.c.block_scale = ffi.cast("float *", ffi.from_buffer(grid))
        self.c.scale_stride = grid.shape[1]
        self.c.block_rows, self.c.block_cols = block
        self.c.row_origin, self.c.col_origin = origin


def decode(matrix: Matrix) -> Array:
    """The matrix as float32 [rows, cols]."""
    out = np.empty((matrix.rows, matrix.cols), np.float32)
    check(lib.kt_decode(matrix.c, ffi.cast("float *", ffi.from_buffer(out))))
    return out
