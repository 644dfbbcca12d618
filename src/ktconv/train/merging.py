"""Adapters added to the weights of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import PROJECTIONS
from ktconv.model.adapters import layer_names
from ktconv.model.fitting import settings_of
from ktconv.model.module import PackedExperts
from ktconv.model.sites import Site, find_experts
from ktconv.source.adapter.files import LowRank
from ktconv.source.adapter.names import PREFIX
from ktconv.source.adapter.parameters import Layout
from ktconv.train.adapter_files import Adapter, Linear

_A, _B = ".lora_A.weight", ".lora_B.weight"


def merge(
    model: nn.Module,
    directory: str | Path,
    *,
    alpha: float | None = None,
    lora_b_layout: Layout | None = None,
) -> None:
    """Add an adapter to the weights of a model that has its own experts: W becomes
    W + alpha / rank * B A, computed in fp32 and rounded once to the dtype of W.

    The model is then one without adapters: save it with its own save_pretrained, and convert it as
    any other. `directory`, `alpha` and `lora_b_layout` are as for `load`; LoRA of linear layers
    next to the experts is added, too. CheckpointError, and the model is as before, unless the model
    has every matrix of the adapter in its shape; UsageError for packed or quantized experts.
    """
    sites = find_experts(model)
    for site in sites.values():
        _check_own(site)
    config = settings_of(model)
    names = {layer: layer_names(site, config.family) for layer, site in sites.items()}
    adapter = Adapter(Path(directory), names, alpha, lora_b_layout)
    adapter.config.check_mergeable()
    linear = _linear(model, adapter)
    for _ in _pairs(adapter, sites):  # all are checked before anything changes
        pass
    with torch.no_grad():
        for weight, (a, b, scale) in _pairs(adapter, sites):
            _add(weight, torch.from_numpy(a), torch.from_numpy(b), scale)
        for weight, added in linear.values():
            _add(weight, *added)


def _check_own(site: Site) -> None:
    if isinstance(site.module, PackedExperts):
        raise UsageError(
            f"{site.path} uses packed experts, to which nothing can be added",
            "load the model with its own experts",
        )
    if site.adapted or not site.own.runs:
        raise UsageError(
            f"{site.path} does not have its weights in memory as bf16, fp16 or fp32",
            "load the model with its own experts, in bf16 and without adapters",
        )


def _pairs(adapter: Adapter, sites: Mapping[int, Site]) -> Iterator[tuple[Tensor, LowRank]]:
    """The matrices of experts that the adapter changes, and what is added to each."""
    for layer, found in adapter.projections.items():
        own = sites[layer].own
        matrices = own.matrices(0)
        for projection in filter(found.__contains__, PROJECTIONS):
            if projection not in matrices:
                raise CheckpointError(
                    f"{adapter.directory} has LoRA of {projection} in layer {layer}, whose experts "
                    "have none",
                    "give the adapter of this model",
                )
            shape = matrices[projection].shape
            scale = adapter.expert_scale(layer, projection, own.count, shape)
            for expert in adapter.covered(layer, projection, own.count):
                pair = adapter.expert(layer, projection, expert, scale)
                yield own.matrices(expert)[projection], pair


def _linear(model: nn.Module, adapter: Adapter) -> dict[str, tuple[Tensor, Linear]]:
    """The weights of other modules that the adapter changes, and what is added to each."""
    found: dict[str, tuple[Tensor, Linear]] = {}
    for key in adapter.others:
        name = key.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B)
        weight = _weight(model, name)
        if weight is None or not key.endswith((_A, _B)):
            raise CheckpointError(
                f"{adapter.directory} contains {key}, for which the model has no matrix",
                "give the adapter of this model; merge one of another kind with PEFT",
            )
        if name not in found:
            found[name] = weight, adapter.linear(name, weight.shape)
    return found


def _weight(model: nn.Module, name: str) -> Tensor | None:
    """[outputs, inputs] of a linear layer or a router; None where there is none."""
    try:
        weight = model.get_submodule(name).weight
    except AttributeError:
        return None
    return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None


def _add(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """weight + scale * b a, in place."""
    added = scale * (b.float() @ a.float())
    weight.copy_(weight.float() + added.to(weight.device))
