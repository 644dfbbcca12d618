"""Models of transformers on packed experts, and how far that moves what they say.

`routers` and `names` need NumPy only. The rest needs PyTorch and transformers, which are
imported when it is first used:

    model, tokenizer = load_model(source)
    with replace_experts(model, output, keep=True) as replaced:
        report = perplexity_and_divergence(model, replaced, windows(tokenizer, text, 512, 40))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ktconv.errors import UsageError
from ktconv.families.family import RouterSpec
from ktconv.families.names import (
    RouterTensors,
    SharedExpert,
    router_tensors,
    shared_expert_tensors,
)
from ktconv.families.routers import route, router_of

if TYPE_CHECKING:
    from ktconv.model.evaluate import (
        Divergence,
        LayerInput,
        capture_layer_inputs,
        check_memory,
        greedy_side_by_side,
        load_model,
        perplexity_and_divergence,
        sample_text,
        windows,
    )
    from ktconv.model.module import PackedExperts
    from ktconv.model.replace import ReplacedExperts, find_experts, replace_experts

_WITH_TORCH = {
    "Divergence": "evaluate",
    "LayerInput": "evaluate",
    "capture_layer_inputs": "evaluate",
    "check_memory": "evaluate",
    "greedy_side_by_side": "evaluate",
    "load_model": "evaluate",
    "perplexity_and_divergence": "evaluate",
    "sample_text": "evaluate",
    "windows": "evaluate",
    "PackedExperts": "module",
    "ReplacedExperts": "replace",
    "find_experts": "replace",
    "replace_experts": "replace",
}

__all__ = [
    "Divergence",
    "LayerInput",
    "PackedExperts",
    "ReplacedExperts",
    "RouterSpec",
    "RouterTensors",
    "SharedExpert",
    "capture_layer_inputs",
    "check_memory",
    "find_experts",
    "greedy_side_by_side",
    "load_model",
    "perplexity_and_divergence",
    "replace_experts",
    "route",
    "router_of",
    "router_tensors",
    "sample_text",
    "shared_expert_tensors",
    "windows",
]


def __getattr__(name: str) -> Any:
    """What needs PyTorch, imported at its first use; UsageError where that is not installed."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers"):
            raise
        raise UsageError(
            f"running the model itself needs {missing}, which is not installed",
            "install it with: pip install 'ktconv[model]'",
        ) from None
