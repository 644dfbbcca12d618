"""Non-expert tensors that engines could not read with the output's config.

Its quantization_config describes packed experts only. Quantized matrices of attention and shared
experts are therefore decoded to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktconv.errors import CheckpointError
from ktconv.source import Checkpoint, TensorRef
from ktconv.source.gguf.hub_names import HubNames
from ktconv.source.others import OtherWeight, OtherWeights

_PLAIN = ("BF16", "F16", "F32", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL")
_HINT = "use the unquantized version of this model, or its FP8 version with block scales"


def decoded_others(
    checkpoint: Checkpoint, hub_names: HubNames | None = None
) -> tuple[Mapping[str, OtherWeight], frozenset[str]]:
    """The quantized matrices among the other tensors by the name of their primary tensor, and the
    names of what stands next to those. Of GGUF models (`hub_names`) also what is float32 there
    although the model's own checkpoint has it in bf16.

    Raises CheckpointError for a model whose other tensors no engine could read then.
    """
    others = OtherWeights(checkpoint)
    decoded: dict[str, OtherWeight] = {}
    dropped: set[str] = set()
    for _, parts in others.modules():
        if len(parts) == 1:
            [tensor] = parts.values()
            if hub_names is not None and not _is_kept(tensor, hub_names):
                decoded[tensor.name] = others.matrix(parts)
            elif tensor.dtype not in _PLAIN:
                raise CheckpointError(
                    f"{tensor.name} is {tensor.dtype} without scales that ktconv knows", _HINT
                )
            continue
        weight = others.matrix(parts)
        primary = weight.matrix.tensor
        decoded[primary.name] = weight
        dropped |= {tensor.name for tensor in parts.values() if tensor.name != primary.name}
    return decoded, frozenset(dropped)


def _is_kept(tensor: TensorRef, names: HubNames) -> bool:
    """Whether a plain tensor of a GGUF file is copied as it is."""
    if tensor.dtype == "F32":
        return names.is_float32(tensor.name)
    return tensor.dtype in _PLAIN
