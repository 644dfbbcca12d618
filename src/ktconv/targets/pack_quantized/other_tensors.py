"""Non-expert tensors that engines could not read with the output's config.

Its quantization_config describes packed experts only. Block-quantized FP8 matrices of attention
and shared experts are therefore decoded to bf16, which is lossless; models that were quantized in
another way are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktconv.checkpoint import Checkpoint, ExpertMatrix, TensorRef
from ktconv.checkpoint.config import interpret_config
from ktconv.checkpoint.encodings.fp8 import FP8_BLOCK, SCALE
from ktconv.checkpoint.others import other_matrix
from ktconv.errors import CheckpointError

_PLAIN = ("BF16", "F16", "F32", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL")
_HINT = "use the unquantized version of this model, or its FP8 version with block scales"


def decoded_others(checkpoint: Checkpoint) -> tuple[Mapping[str, ExpertMatrix], frozenset[str]]:
    """The FP8 matrices among the other tensors by name, and the names of their scales.

    Raises CheckpointError for a model whose other tensors no engine could read then.
    """
    config = interpret_config(checkpoint.config)
    if config.quant_method not in (None, "fp8"):
        raise CheckpointError(
            f"config.json says that the model is quantized by {config.quant_method} already", _HINT
        )
    by_name = {tensor.name: tensor for tensor in checkpoint.other_tensors}
    decoded: dict[str, ExpertMatrix] = {}
    dropped = set()
    for tensor in checkpoint.other_tensors:
        scale = by_name.get(f"{tensor.name}_scale_inv")
        if tensor.dtype in FP8_BLOCK.dtypes and scale is not None and len(tensor.shape) == 2:
            decoded[tensor.name] = other_matrix(checkpoint, tensor, scale)
            dropped.add(scale.name)
        elif tensor.dtype not in _PLAIN and not _is_scale(tensor, by_name):
            raise CheckpointError(
                f"{tensor.name} is {tensor.dtype} without scales that ktconv knows", _HINT
            )
    return decoded, frozenset(dropped)


def _is_scale(tensor: TensorRef, by_name: Mapping[str, TensorRef]) -> bool:
    return tensor.name.endswith(SCALE) and tensor.name.removesuffix("_scale_inv") in by_name
