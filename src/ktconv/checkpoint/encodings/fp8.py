"""FP8 E4M3 weights with one scale per block: value = fp8 * weight_scale_inv[block].

(The name weight_scale_inv comes from DeepSeek; it is the factor to multiply with.)
"""

from __future__ import annotations

from ktconv.checkpoint.config import ModelConfig
from ktconv.checkpoint.elements import F8_E4M3
from ktconv.checkpoint.encodings.base import WEIGHT, Encoding, Parts
from ktconv.checkpoint.types import BlockGrid, Quantization, TensorRef
from ktconv.checkpoint.views import StoredView
from ktconv.errors import CheckpointError

SCALE = "weight_scale_inv"
# U8 has the same bits as F8_E8M0: older files were written before safetensors had that name.
SCALE_DTYPES = {"F32": "F32", "BF16": "BF16", "F8_E8M0": "E8M0", "U8": "E8M0"}


def block_scale(parts: Parts, view: StoredView, config: ModelConfig) -> Quantization:
    """The block scales of `view`; the grid covers each expert's stored matrix.

    The last block of a row or column may be ragged. Raises CheckpointError where the
    grid's shape or dtype does not match config.json's block size.
    """
    tensor = parts[SCALE]
    block_rows, block_cols = _block_size(tensor, view, config)
    grid_rows = -(-view.stored_rows // block_rows)  # ceil
    grid_cols = -(-view.stored_cols // block_cols)
    _check_grid(tensor, parts[WEIGHT], view, (grid_rows, grid_cols), (block_rows, block_cols))
    row_stride, col_stride = grid_cols, 1
    row_origin, col_origin = view.row, view.col
    if view.transposed:
        row_stride, col_stride = col_stride, row_stride
        row_origin, col_origin = col_origin, row_origin
    grid = BlockGrid(
        tensor,
        SCALE_DTYPES[tensor.dtype],
        start=view.expert * grid_rows * grid_cols,
        row_stride=row_stride,
        col_stride=col_stride,
        block_rows=block_rows,
        block_cols=block_cols,
        row_origin=row_origin,
        col_origin=col_origin,
    )
    return Quantization(grid)


def _block_size(tensor: TensorRef, view: StoredView, config: ModelConfig) -> tuple[int, int]:
    size = config.block_size
    if size is None:
        raise CheckpointError(
            f"{tensor.name} contains block scales, but config.json has no "
            "quantization_config.weight_block_size",
            "Add the block size to config.json, for example [128, 128].",
        )
    if view.transposed and size[0] != size[1]:
        # Nothing says whether the size's first number then counts stored rows or outputs.
        raise CheckpointError(
            f"{tensor.name}: block size {list(size)} is not supported for weights stored "
            "[in, out], only square blocks",
            "Use a checkpoint that stores its experts [out, in].",
        )
    return size


def _check_grid(
    tensor: TensorRef,
    weight: TensorRef,
    view: StoredView,
    grid: tuple[int, int],
    block: tuple[int, int],
) -> None:
    expected = grid if view.experts is None else (view.experts, *grid)
    if tensor.shape != expected:
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}: one "
            f"scale per {block[0]} x {block[1]} block of {weight.name} {list(weight.shape)}",
            "Check quantization_config.weight_block_size in config.json.",
        )
    if tensor.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{tensor.name} has dtype {tensor.dtype}, which is not supported for block scales",
            f"Supported are {', '.join(SCALE_DTYPES)}.",
        )


def check_declared(weight: TensorRef, config: ModelConfig) -> None:
    """CheckpointError if quantization_config says that `weight` is something else."""
    declared = {"quant_method": (config.quant_method, "fp8"), "fmt": (config.fp8_format, "e4m3")}
    for key, (value, expected) in declared.items():
        if value is not None and expected not in value.lower():
            raise CheckpointError(
                f"{weight.name} is {weight.dtype} with block scales, but quantization_config."
                f"{key} in config.json is {value!r:.80}",
                "Check that config.json and the weights belong to one checkpoint.",
            )


FP8_BLOCK = Encoding(
    "fp8-block",
    ("F8_E4M3",),
    F8_E4M3,
    companions=(SCALE,),
    quantization=block_scale,
    check=check_declared,
)
