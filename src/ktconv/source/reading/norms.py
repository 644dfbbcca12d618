"""The norm before the block of some experts, whose weights scale the channels of their inputs."""

from __future__ import annotations

import numpy as np

from ktconv.families.names import is_gguf, norm_tensors
from ktconv.source import MoELayer, TensorRef
from ktconv.source.reading.tensors import SourceTensors
from ktconv.source.settings import ModelSettings
from ktconv.system.arrays import F32


def find_norm(tensors: SourceTensors, config: ModelSettings, layer: MoELayer) -> TensorRef | None:
    """Find the norm by its name; its shape may be any."""
    return tensors.find(norm_tensors(layer.source, config.family))


def norm_scale(
    tensors: SourceTensors, config: ModelSettings, layer: MoELayer, norm: TensorRef
) -> F32:
    """Factors of the norm for each channel, [width]. Some families store them less 1."""
    row = config.family
    less_one = row is not None and row.norm_less_one and not is_gguf(layer.source)
    scale: F32 = tensors.vector(norm) + np.float32(less_one)
    return scale
