"""Layers of experts as a streamed pass sees them, and choices of tokens."""

from __future__ import annotations

import copy
from typing import Any


def on_meta(site: Any) -> Any:
    """The same site with its matrices and biases on the meta device, as streamed models have
    them."""
    import torch

    from ktconv.model.sites import Site
    from ktconv.model.stored import bias_name

    parent, module = torch.nn.Module(), copy.deepcopy(site.module)
    biases = map(bias_name, site.own.parameter_names) if site.own.biased else ()
    for name in (*site.own.parameter_names, *biases):
        place, _, last = name.rpartition(".")
        owner = module.get_submodule(place)
        shape = getattr(owner, last).shape
        setattr(owner, last, torch.nn.Parameter(torch.empty(shape, device="meta")))
    setattr(parent, site.name, module)
    return Site(site.layer, site.path, parent, site.name)


def routed(tokens: int, experts: int, top_k: int, seed: int) -> tuple[Any, Any]:
    """Ids, of which no two of a token are the same and the last expert is never chosen, and
    weights, both [tokens, top_k]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand((tokens, experts - 1), generator=generator)
    ids = scores.topk(top_k, dim=1).indices
    return ids, torch.rand((tokens, top_k), generator=generator)


def experts_module(count: int, hidden: int, inner: int) -> Any:
    """The experts of a Qwen3-MoE layer, computed one after the other."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=count)
    config._experts_implementation = "eager"
    return Qwen3MoeExperts(config).requires_grad_(False)


def site_of(module: Any, layer: int = 0) -> Any:
    """Where a module alone is in a model."""
    import torch

    from ktconv.model.sites import Site

    parent = torch.nn.Module()
    parent.experts = module
    return Site(layer, f"model.layers.{layer}.mlp.experts", parent, "experts")
