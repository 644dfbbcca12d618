"""Engines that load a checkpoint of encoded experts, by its format and by the model."""

from __future__ import annotations

from collections.abc import Mapping

from ktconv.families import table
from ktconv.source import Checkpoint
from ktconv.targets.consumers import model_types
from ktconv.targets.encoded.readers import READERS, TRANSFORMERS, Reader, why_not_stacked
from ktconv.targets.encoded.stacking import NUMBERED


def transformers_reads_packed(checkpoint: Checkpoint) -> bool:
    """False for families whose experts transformers reads in fused form alone: weights of an output
    would not be found, and be initialised at random with a warning."""
    if all(len(layer.experts[0]["up"].tensor.shape) < 3 for layer in checkpoint.layers):
        return True
    types = checkpoint.config.checked.model_types
    rows = (table.FAMILIES.of(kind) for kind in types)
    return any(row is not None and not row.fused_only for row in rows)


def readers_of(
    name: str, checkpoint: Checkpoint, layout: str = NUMBERED
) -> Mapping[Reader, str | None]:
    """Each engine that loads whole models, with why it does not read the format `name` of this one
    in the layout `layout` of experts; None where it does. Of experts with the model's own names."""
    types = model_types(checkpoint)
    found = {
        reader: reader.failure(name, types) or why_not_stacked(reader, name, layout, types)
        for reader in READERS
    }
    if found[TRANSFORMERS] is None and not transformers_reads_packed(checkpoint):
        kind = checkpoint.config.model_type or "this model"
        found[TRANSFORMERS] = f"reads the experts of {kind} only in fused form"
    return found
