"""Tensors other than routed experts, as matrices that are read in the same way."""

from __future__ import annotations

from ktconv.checkpoint.config import interpret_config
from ktconv.checkpoint.encodings import choose_encoding
from ktconv.checkpoint.encodings.base import WEIGHT
from ktconv.checkpoint.encodings.fp8 import SCALE
from ktconv.checkpoint.types import Checkpoint, ExpertMatrix, TensorRef
from ktconv.checkpoint.views import StoredView


def other_matrix(
    checkpoint: Checkpoint, tensor: TensorRef, scale: TensorRef | None
) -> ExpertMatrix:
    """A matrix, or a vector as its only row; `scale` has the block scales of an FP8 one.

    Raises CheckpointError for another encoding, or where the scales do not fit config.json's
    block size.
    """
    rows, cols = tensor.shape if len(tensor.shape) == 2 else (1, *tensor.shape)
    view = StoredView(rows, cols, rows, cols)
    parts = {WEIGHT: tensor} if scale is None else {WEIGHT: tensor, SCALE: scale}
    encoding = choose_encoding(parts)
    quantization = None
    if encoding.quantization is not None:
        config = interpret_config(checkpoint.config)
        quantization = encoding.quantization(parts, view, config)
    return view.matrix(tensor, encoding.element, quantization)
