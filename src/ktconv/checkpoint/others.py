"""Tensors beside the routed experts as matrices that can be read like theirs."""

from __future__ import annotations

from ktconv.checkpoint.config import interpret_config
from ktconv.checkpoint.encodings.fp8 import FP8_BLOCK, SCALE
from ktconv.checkpoint.types import Checkpoint, ExpertMatrix, TensorRef
from ktconv.checkpoint.views import StoredView


def other_matrix(
    checkpoint: Checkpoint, tensor: TensorRef, scale: TensorRef | None
) -> ExpertMatrix:
    """A matrix, or a vector as its only row; `scale` holds the block scales of an FP8 one.

    Raises CheckpointError where the scales do not fit config.json's block size.
    """
    rows, cols = tensor.shape if len(tensor.shape) == 2 else (1, *tensor.shape)
    view = StoredView(rows, cols, rows, cols)
    blocks = None
    if scale is not None:
        assert FP8_BLOCK.make_scale is not None
        parts = {"weight": tensor, SCALE: scale}
        blocks = FP8_BLOCK.make_scale(parts, view, interpret_config(checkpoint.config))
    return view.matrix(tensor, blocks)
