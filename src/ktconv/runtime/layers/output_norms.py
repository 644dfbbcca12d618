"""The norm that some models apply to each expert's output, from their source."""

from __future__ import annotations

from ktconv.errors import CheckpointError
from ktconv.families.names import post_norm_tensors
from ktconv.runtime.layers.experts import OutputNorm
from ktconv.source import MoELayer, TensorRef
from ktconv.source.reading.tensors import SourceTensors
from ktconv.source.settings import ModelSettings


def norm_tensor(tensors: SourceTensors, layer: MoELayer) -> TensorRef | None:
    """Weight of the norm, of as many elements as the experts have outputs; None for models without.

    Raises CheckpointError where it is missing or of another shape.
    """
    if not layer.activation.post_norm:
        return None
    names = post_norm_tensors(layer.source)
    found = tensors.find(names)
    if found is None:
        raise CheckpointError(
            f"layer {layer.index} has no norm of its experts' outputs: {' or '.join(names)} does "
            "not exist"
        )
    if found.shape != (layer.hidden_size,):
        raise CheckpointError(
            f"{found.name} has shape {list(found.shape)}, not [{layer.hidden_size}]"
        )
    return found


def output_norm(
    tensors: SourceTensors, config: ModelSettings, layer: MoELayer
) -> OutputNorm | None:
    """Read from the source; None for models without."""
    tensor = norm_tensor(tensors, layer)
    if tensor is None:
        return None
    return OutputNorm(tensors.vector(tensor), config.post_norm_epsilon)
