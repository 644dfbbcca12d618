"""Whether transformers can build a model from experts that are stored one by one.

Families that keep their experts fused on disk are not always read in any other form, and what is
not read is made up at random, with no more than a warning.
"""

from __future__ import annotations

from typing import Any

from ktconv.checkpoint import Checkpoint, MoELayer
from ktconv.checkpoint.config import interpret_config


def loading_notes(checkpoint: Checkpoint) -> list[str]:
    """A note for users of transformers; empty if the source stores its experts one by one."""
    if not any(is_fused(layer) for layer in checkpoint.layers):
        return []
    types = sorted(interpret_config(checkpoint.config).model_types)
    if any(_reads_experts_one_by_one(kind) for kind in types):
        return []
    name = checkpoint.config.get("model_type", "this model")
    return [
        f"transformers reads the experts of {name} only in fused form: it cannot load this "
        "output, which is for engines that read them one by one, as vLLM does"
    ]


def is_fused(layer: MoELayer) -> bool:
    return len(layer.experts[0]["gate"].tensor.shape) == 3


def _reads_experts_one_by_one(model_type: str) -> bool:
    from transformers import conversion_mapping as untyped

    mapping: Any = untyped
    changes = mapping.get_checkpoint_conversion_mapping(model_type) or []
    patterns = [p for change in changes for p in getattr(change, "source_patterns", ())]
    return any("experts.*." in pattern for pattern in patterns)
