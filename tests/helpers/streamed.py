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
