"""Whether transformers loads experts that are packed one by one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ktconv.checkpoint import Checkpoint
from ktconv.checkpoint.config import interpret_config

_METHOD = "compressed-tensors"


def transformers_reads_packed(checkpoint: Checkpoint) -> bool:
    """False for families whose experts transformers reads in fused form alone: weights of an output
    would not be found, and be initialised at random with a warning. True where it is not installed,
    and nobody knows."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        return True
    if all(len(layer.experts[0]["up"].tensor.shape) < 3 for layer in checkpoint.layers):
        return True
    types = interpret_config(checkpoint.config).model_types
    return any(_one_by_one(kind) or _taken_apart(kind) for kind in sorted(types))


def _one_by_one(model_type: str) -> bool:
    from transformers import conversion_mapping as untyped

    mapping: Any = untyped
    changes = mapping.get_checkpoint_conversion_mapping(model_type) or []
    patterns = [p for change in changes for p in getattr(change, "source_patterns", ())]
    return any("experts.*." in pattern for pattern in patterns)


def _taken_apart(model_type: str) -> bool:
    """Whether transformers splits the experts of quantized models of this type (Llama 4)."""
    from transformers.quantizers import base as untyped

    base: Any = untyped
    return any(
        kind.lower().startswith(model_type.removesuffix("_text"))
        and _METHOD in [method.value for method in about["quantization_methods"]]
        for kind, about in base.MODULES_TO_PATCH_FOR_QUANTIZATION.items()
    )
