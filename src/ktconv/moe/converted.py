"""Experts of a converted model, with norms of their outputs and weights on their inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ktconv.errors import CheckpointError
from ktconv.families.activations import post_norm_epsilon
from ktconv.families.names import post_norm_tensors
from ktconv.formats.decode import bf16_to_f32
from ktconv.moe.experts import Experts, OutputNorm
from ktconv.moe.load import open_layer, output_config, stated_activation
from ktconv.moe.slots import Slots
from ktconv.packed.weights import PackedWeights, map_file, open_packed
from ktconv.system.arrays import F32
from ktconv.targets.renaming import output_name
from ktconv.writer.manifest import read_manifest

_VECTORS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def open_converted(
    directory: Path, layer: int | None = None, slots: Slots | None = None
) -> Experts:
    """As `open_experts`, and with the norm of the experts' outputs where the model has one.

    Raises CheckpointError also where that norm is not in `directory`.
    """
    number, experts = open_layer(directory, layer, slots=slots)
    stated = stated_activation(directory, number)
    experts.weight_on_input = stated.weight_on_input
    if stated.post_norm:
        experts.norm = _norm(open_packed(directory), number, experts.hidden)
    return experts


def _norm(packed: PackedWeights, layer: int, hidden: int) -> OutputNorm:
    manifest = read_manifest(packed.directory)
    source = manifest.layers.get(layer, {}).get("source") if manifest else None
    names = [output_name(name) for name in post_norm_tensors(str(source))]
    found = next((packed.others[name] for name in names if name in packed.others), None)
    if found is None or found.dtype not in _VECTORS or found.shape != (hidden,):
        raise CheckpointError(
            f"{packed.directory} does not have the norm of experts' outputs in layer {layer}, "
            f"{' or '.join(names)} with {hidden} numbers",
            "convert the model without --experts-only, or use ktconv.model.replace_experts",
        )
    stored = map_file(found.file)[found.offset : found.offset + found.nbytes].tobytes()
    weight = np.frombuffer(stored, _VECTORS[found.dtype])
    values: F32 = bf16_to_f32(weight) if found.dtype == "BF16" else weight.astype(np.float32)
    return OutputNorm(values, post_norm_epsilon(output_config(packed.directory)))
