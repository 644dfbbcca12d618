"""Fine-tuning of packed experts: LoRA forward and backward (docs/fine-tuning.md).

    experts = LoRAExperts(MoELayer.load("OUTPUT", 3), rank=16, alpha=32)
    y = experts(x, ids, weights)                                # one layer

    model, tokenizer = load_model("MODEL", experts=False)       # of ktconv.model
    prepared = prepare(model, "OUTPUT", rank=16, alpha=32)      # all layers of a model
    Trainer(model=model, ...).train()                           # of transformers, or any loop
    save(model, "ADAPTER")

`lora` has the module, `models` puts it into a model, `adapters` and `merging` are about what was
trained; `reference` computes the same in plain torch. PyTorch and transformers are imported when a
name is first used, PEFT only for models that have something of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ktconv.errors import UsageError

if TYPE_CHECKING:
    from ktconv.train.adapters import load, save
    from ktconv.train.checkpoints import SaveAdapter
    from ktconv.train.lora import LoRAExperts
    from ktconv.train.merging import merge
    from ktconv.train.models import Prepared, prepare

__all__ = ["LoRAExperts", "Prepared", "SaveAdapter", "load", "merge", "prepare", "save"]
_PACKAGES = ("torch", "transformers", "greenlet")
_MODULES = {
    "LoRAExperts": "lora",
    "Prepared": "models",
    "SaveAdapter": "checkpoints",
    "load": "adapters",
    "merge": "merging",
    "prepare": "models",
    "save": "adapters",
}


def __getattr__(name: str) -> Any:
    """UsageError where a package is not installed that the name needs."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        raise UsageError(
            f"fine-tuning needs {missing}, which is not installed",
            "install it with: pip install 'ktconv[train]'",
        ) from None
