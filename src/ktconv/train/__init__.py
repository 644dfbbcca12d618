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

from typing import TYPE_CHECKING, Any

from ktconv.errors import UsageError
from ktconv.model import named_in

if TYPE_CHECKING:
    from ktconv.train.adapters import load, save
    from ktconv.train.checkpoints import SaveAdapter
    from ktconv.train.lora import LoRAExperts
    from ktconv.train.merging import merge
    from ktconv.train.models import Prepared, prepare

__all__ = ["LoRAExperts", "Prepared", "SaveAdapter", "load", "merge", "prepare", "save"]
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
    return named_in(__name__, _MODULES, name, _not_installed)


def _not_installed(package: str) -> UsageError:
    return UsageError(
        f"fine-tuning needs {package}, which is not installed",
        "install it with: pip install 'ktconv[train]'",
    )
