"""Experts of a converted model, with norms of their outputs and weights on their inputs."""

from __future__ import annotations

import numpy as np

from ktconv.errors import CheckpointError
from ktconv.families.names import post_norm_tensors
from ktconv.formats.decode import bf16_to_f32
from ktconv.runtime.layers.experts import Experts, OutputNorm
from ktconv.runtime.layers.load import ConvertedModel
from ktconv.runtime.layers.slots import Slots
from ktconv.system.arrays import F32
from ktconv.targets.packed.weights import map_file
from ktconv.targets.renaming import output_name

_VECTORS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def open_converted(
    model: ConvertedModel, layer: int | None = None, slots: Slots | None = None
) -> Experts:
    """Open experts as `open_experts`, and with the norm of their outputs where the model has one.

    Raises CheckpointError also where that norm is not among its tensors.
    """
    number, experts = model.open_layer(layer, slots)
    stated = model.activation(number)
    experts.weight_on_input = stated.weight_on_input
    if stated.post_norm:
        experts.norm = _norm(model, number, experts.hidden)
    return experts


def _norm(model: ConvertedModel, layer: int, hidden: int) -> OutputNorm:
    manifest = model.manifest
    source = manifest.layers.get(layer, {}).get("source") if manifest else None
    names = [output_name(name) for name in post_norm_tensors(str(source))]
    found = model.other(names)
    if found is None or found.dtype not in _VECTORS or found.shape != (hidden,):
        raise CheckpointError(
            f"{model.directory} does not have the norm of experts' outputs in layer {layer}, "
            f"{' or '.join(names)} with {hidden} numbers",
            "convert the model without --experts-only, or use ktconv.model.replace_experts",
        )
    stored = map_file(found.file)[found.offset : found.offset + found.nbytes].tobytes()
    weight = np.frombuffer(stored, _VECTORS[found.dtype])
    values: F32 = bf16_to_f32(weight) if found.dtype == "BF16" else weight.astype(np.float32)
    return OutputNorm(values, model.config.post_norm_epsilon)
