"""The numbers of block scales: from a tensor's bytes to the float32 grid of one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktconv.checkpoint.types import BlockScale, ExpertMatrix
from ktconv.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

    import numpy as np
    from numpy.typing import NDArray

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E8M0": 1, "U8": 1}
_HINT = "The checkpoint is damaged, or was written by a faulty quantizer; get it again."


def scale_grid_shape(matrix: ExpertMatrix) -> tuple[int, int]:
    """Rows and columns of the grid from its first block to the last that `matrix` touches."""
    scale = _scale_of(matrix)
    rows = -(-(scale.row_origin + matrix.rows) // scale.block_rows)
    cols = -(-(scale.col_origin + matrix.cols) // scale.block_cols)
    return rows, cols


def scale_span(matrix: ExpertMatrix) -> tuple[int, int]:
    """Offset in the file and length, in bytes, of the read that holds `matrix`'s scales."""
    scale = _scale_of(matrix)
    rows, cols = scale_grid_shape(matrix)
    count = (rows - 1) * scale.row_stride + (cols - 1) * scale.col_stride + 1
    item = _ITEM_BYTES[scale.tensor.dtype]
    return scale.tensor.offset + scale.start * item, count * item


def load_block_scale(matrix: ExpertMatrix, data: Buffer) -> NDArray[np.float32]:
    """The contiguous float32 grid of `matrix`, of shape `scale_grid_shape(matrix)`.

    `data` holds the bytes of `scale_span(matrix)`. As `BlockScale` says, element (n, k) of
    the matrix takes grid entry ((row_origin + n) // block_rows, (col_origin + k) //
    block_cols); the origins are not cut off. Every scale is finite and positive, else
    CheckpointError names the tensor and the block.
    """
    import numpy as np

    scale = _scale_of(matrix)
    item = _ITEM_BYTES[scale.tensor.dtype]
    raw: NDArray[np.unsignedinteger] = np.ndarray(
        scale_grid_shape(matrix),
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

    wrong = ~(np.isfinite(grid) & (grid > 0))
    if not wrong.any():
        return
    row, col = (int(index) for index in np.argwhere(wrong)[0])
    raise CheckpointError(
        f"{scale.tensor.name}: the scale of block ({row}, {col}){_of_expert(scale)} is "
        f"{grid[row, col]}, not a positive finite number",
        _HINT,
    )


def _of_expert(scale: BlockScale) -> str:
    """Which expert's grid it is, where one tensor holds all of them."""
    if len(scale.tensor.shape) != 3:
        return ""
    return f" of expert {scale.start // (scale.tensor.shape[1] * scale.tensor.shape[2])}"


def _scale_of(matrix: ExpertMatrix) -> BlockScale:
    if matrix.scale is None:
        raise ValueError(f"{matrix.tensor.name} has no block scales")
    return matrix.scale
