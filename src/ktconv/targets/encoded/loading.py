"""Whether transformers loads experts that are packed one by one."""

from __future__ import annotations

from ktconv.checkpoint import Checkpoint
from ktconv.checkpoint.config import interpret_config
from ktconv.families import table


def transformers_reads_packed(checkpoint: Checkpoint) -> bool:
    """False for families whose experts transformers reads in fused form alone: weights of an output
    would not be found, and be initialised at random with a warning."""
    if all(len(layer.experts[0]["up"].tensor.shape) < 3 for layer in checkpoint.layers):
        return True
    types = interpret_config(checkpoint.config).model_types
    rows = (table.FAMILIES.of(kind) for kind in types)
    return any(row is not None and not row.fused_only for row in rows)
