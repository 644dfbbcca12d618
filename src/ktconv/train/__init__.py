"""Fine-tuning of packed experts: LoRA forward and backward (docs/fine-tuning.md).

    from ktconv.train import LoRAExperts

    experts = LoRAExperts(MoELayer.load("OUTPUT", 3), rank=16, alpha=32)
    y = experts(x, ids, weights)

`reference` computes the same in plain torch. PyTorch is imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ktconv.errors import UsageError

if TYPE_CHECKING:
    from ktconv.train.lora import LoRAExperts

__all__ = ["LoRAExperts"]
_MODULES = {"LoRAExperts": "lora"}


def __getattr__(name: str) -> Any:
    """UsageError where PyTorch is not installed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise UsageError(
            "fine-tuning needs torch, which is not installed",
            "install it with: pip install 'ktconv[model]'",
        ) from None
