"""FP8 E4M3 weights with scales of any granularity: value = fp8 * scale of its block.

Scales have many names; in spite of "inv" in DeepSeek's they are all multiplied. How many inputs
and outputs share one is in the shape of the scales: one for the tensor, or for gate and for up in
a tensor of both, one per output (channel), one per output and group of inputs (MXFP8: 32), or a
grid of blocks, 128 x 128 if config.json says no other size.
"""

from __future__ import annotations

from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.source.config import ModelConfig
from ktconv.source.elements import F8_E4M3
from ktconv.source.encodings.base import SCALE, Companion, Encoding, Roles
from ktconv.source.encodings.shapes import (
    FLOATS,
    POWERS,
    grid_of_groups,
    grid_with_blocks,
)
from ktconv.source.types import BlockGrid, Quantization
from ktconv.source.views import StoredView

SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
SCALE_NUMBERS = {**FLOATS, **POWERS}
_USUAL_BLOCK = (128, 128)


def _block(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    tensor = roles[SCALE]
    block = config.block_size or _USUAL_BLOCK
    if view.transposed and block[0] != block[1] and sum(size > 1 for size in tensor.shape) > 1:
        # Nothing says whether the size's first number then counts stored rows or outputs.
        raise CheckpointError(
            f"{tensor.name}: block size {list(block)} is not supported for weights stored "
            "[in, out], only square blocks",
            "Use a checkpoint that stores its experts [out, in].",
        )
    grid = grid_with_blocks(tensor, view, SCALE_NUMBERS[tensor.dtype], block)
    return None if grid is None else Quantization(grid)


def _groups(roles: Roles, view: StoredView, config: ModelConfig) -> BlockGrid | None:
    tensor = roles[SCALE]
    return grid_of_groups(tensor, view, SCALE_NUMBERS[tensor.dtype], config)


def _tensor(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    grid = _groups(roles, view, config)
    outputs, inputs = view.outputs_and_inputs
    if grid is None or grid.block_cols != inputs or grid.block_rows not in (outputs, view.rows):
        return None
    return Quantization(grid)


def _channel(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    grid = _groups(roles, view, config)
    inputs = view.outputs_and_inputs[1]
    return Quantization(grid) if grid is not None and grid.block_cols == inputs else None


def _group(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    grid = _groups(roles, view, config)
    return Quantization(grid) if grid is not None else None


_FP8 = Encoding(
    "fp8-block",
    ("F8_E4M3",),
    F8_E4M3,
    companions=(Companion(SCALE, SCALE_NAMES, tuple(SCALE_NUMBERS)),),
    ignored=("input_scale", "activation_scale", "qscale_act"),
    formats=("e4m3",),
    methods=("fp8", "compressed-tensors", "modelopt", "quark", "auto-round"),
)
FP8_TENSOR = replace(_FP8, name="fp8-tensor", quantization=_tensor)
FP8_BLOCK = replace(_FP8, quantization=_block)
FP8_CHANNEL = replace(_FP8, name="fp8-channel", quantization=_channel)
FP8_GROUP = replace(_FP8, name="fp8-group", quantization=_group)
FP8 = (FP8_BLOCK, FP8_TENSOR, FP8_CHANNEL, FP8_GROUP)
