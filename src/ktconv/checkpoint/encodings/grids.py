"""The numbers of block scales: from a tensor's bytes to the float32 grid of one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktconv.checkpoint.types import BlockScale
from ktconv.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

    import numpy as np
    from numpy.typing import NDArray

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E8M0": 1, "U8": 1}
_HINT = "The checkpoint is damaged, or was written by a faulty quantizer; get it again."


def scale_grid_shape(scale: BlockScale, rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of blocks that a matrix of `rows` x `cols` touches, ragged ones too."""
    first_row, first_col = _first_block(scale)
    last_row = (scale.row_origin + rows - 1) // scale.block_rows
    last_col = (scale.col_origin + cols - 1) // scale.block_cols
    return last_row - first_row + 1, last_col - first_col + 1


def scale_span(scale: BlockScale, rows: int, cols: int) -> tuple[int, int]:
    """Offset within `scale.tensor` and length, in bytes, of what holds a matrix's scales."""
    grid_rows, grid_cols = scale_grid_shape(scale, rows, cols)
    row, col = _first_block(scale)
    first = scale.start + row * scale.row_stride + col * scale.col_stride
    count = (grid_rows - 1) * scale.row_stride + (grid_cols - 1) * scale.col_stride + 1
    item = _ITEM_BYTES[scale.tensor.dtype]
    return first * item, count * item


def load_block_scale(scale: BlockScale, rows: int, cols: int, data: Buffer) -> NDArray[np.float32]:
    """The contiguous float32 grid of a matrix of `rows` x `cols`, [grid_rows, grid_cols].

    `data` holds the bytes of `scale_span`. The grid starts with the block that holds element
    (0, 0): element (n, k) takes entry ((row_origin % block_rows + n) // block_rows,
    (col_origin % block_cols + k) // block_cols). Every scale is finite and positive, else
    CheckpointError names the tensor and the block.
    """
    import numpy as np

    item = _ITEM_BYTES[scale.tensor.dtype]
    raw: NDArray[np.unsignedinteger] = np.ndarray(
        scale_grid_shape(scale, rows, cols),
        dtype=f"<u{item}",
        buffer=data,
        strides=(scale.row_stride * item, scale.col_stride * item),
    )
    grid = _decode(raw, item)
    _check_values(scale, grid)
    return grid


def _decode(raw: NDArray[np.unsignedinteger], item: int) -> NDArray[np.float32]:
    """Scales of 4, 2 or 1 bytes (float32, bfloat16, E8M0) as float32, all exactly."""
    import numpy as np

    bits = np.ascontiguousarray(raw).astype(np.uint32)
    if item == 2:
        bits <<= 16
    if item == 1:
        # E8M0 code s is 2^(s-127): float32 with exponent field s and no mantissa. Code 0
        # is a float32 subnormal with one mantissa bit, code 255 is NaN.
        bits = np.where(bits == 0, 1 << 22, np.where(bits == 255, 0x7FC00000, bits << 23))
        bits = bits.astype(np.uint32)
    return bits.view(np.float32)


def _check_values(scale: BlockScale, grid: NDArray[np.float32]) -> None:
    import numpy as np

    # By bits, because a process that treats denormals as zero would find them not positive.
    bits = grid.view(np.uint32)
    wrong = (bits == 0) | (bits >= 0x7F800000)
    if not wrong.any():
        return
    row, col = (int(index) for index in np.argwhere(wrong)[0])
    first_row, first_col = _first_block(scale)
    block = f"block ({first_row + row}, {first_col + col}){_of_expert(scale)}"
    raise CheckpointError(
        f"{scale.tensor.name}: the scale of {block} is "
        f"{grid[row, col]}, not a positive finite number",
        _HINT,
    )


def _of_expert(scale: BlockScale) -> str:
    """Which expert's grid it is, where one tensor holds all of them."""
    if len(scale.tensor.shape) != 3:
        return ""
    return f" of expert {scale.start // (scale.tensor.shape[1] * scale.tensor.shape[2])}"


def _first_block(scale: BlockScale) -> tuple[int, int]:
    """The block of the matrix's element (0, 0), counted in outputs and inputs."""
    return scale.row_origin // scale.block_rows, scale.col_origin // scale.block_cols
