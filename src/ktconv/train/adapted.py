"""Models that have LoRA in their experts."""

from __future__ import annotations

from torch import nn

from ktconv.errors import UsageError
from ktconv.model.module import PackedExperts
from ktconv.model.sites import Site, find_experts
from ktconv.train.lora import LoRAExperts


def adapted_layers(model: nn.Module) -> dict[int, tuple[Site, LoRAExperts]]:
    """Layers of a prepared model, in order. UsageError where it has none."""
    sites = find_experts(model)
    found = {
        layer: (site, site.module.lora)
        for layer, site in sorted(sites.items())
        if isinstance(site.module, PackedExperts) and isinstance(site.module.lora, LoRAExperts)
    }
    if not found:
        raise UsageError(
            f"the experts of this {type(model).__name__} have no LoRA",
            "call ktconv.train.prepare first",
        )
    return found


def trains_experts(model: nn.Module) -> bool:
    """Whether the experts of a model have LoRA with matrices (a rank that is not None)."""
    return any(isinstance(one, LoRAExperts) and one.rank is not None for one in model.modules())
