"""Whether packed experts fit the places where a model has its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.model.listed import ListedExperts
from ktconv.model.load import first_line
from ktconv.model.matching import (
    check_function,
    check_layers,
    check_likeness,
    check_match,
    check_numbers,
    open_layers,
    trial_token,
)
from ktconv.model.module import PackedExperts
from ktconv.model.sites import Site
from ktconv.runtime import sources
from ktconv.runtime.layers import Experts
from ktconv.runtime.layers.load import Hold
from ktconv.source import Checkpoint
from ktconv.source.settings import ModelSettings
from ktconv.system.pool import Pool


def settings_of(model: nn.Module) -> ModelSettings:
    """config.json of the model, or of what is in its wrappers; empty where none of them has one."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            return ModelSettings(config.to_dict())
    return ModelSettings({})


def converted_experts(
    model: nn.Module,
    sites: Mapping[int, Site],
    settings: ModelSettings,
    directory: Path,
    hold: Hold | None = None,
) -> dict[int, Experts]:
    """Each layer's experts in an OUTPUT of quantize-cpu. CheckpointError unless it is one of this
    model: its layers, sizes and activation."""
    layers = model.get_submodule(next(iter(sites.values())).layers_path)
    check_layers(settings, sites, directory, built=len(list(layers.children())))
    experts = open_layers(directory, sites, settings, hold)
    for layer, site in sites.items():
        check_match(settings, layer, site.own, experts[layer], directory)
    return experts


def stored_experts(
    model: nn.Module,
    sites: Mapping[int, Site],
    settings: ModelSettings,
    checkpoint: Checkpoint,
    pool: Pool,
    memory: str = "auto",
) -> dict[int, Experts]:
    """Each layer's experts of a checkpoint of this model, as its numbers are: an OUTPUT of
    quantize-cpu or quantize-gpu in the names of a model, or the model itself. CheckpointError
    where it is another model's, or in numbers that no kernel has exactly."""
    layers = model.get_submodule(next(iter(sites.values())).layers_path)
    built, there = len(list(layers.children())), [one.index for one in checkpoint.layers]
    check_numbers(settings, sites, there, checkpoint.path, built)
    found = {}
    for layer, site in sites.items():
        experts = sources.loaded(checkpoint, layer, None, None, None, pool, memory)
        # What the model's own modules around its experts do.
        experts.norm, experts.weight_on_input = None, False
        check_match(settings, layer, site.own, experts, checkpoint.path)
        found[layer] = experts
    return found


def elsewhere(experts: Experts) -> list[int]:
    """Ids of experts that are not among the packed ones."""
    return [index for index, origin in enumerate(experts.origins) if origin < 0]


def check_place(site: Site) -> None:
    """UsageError unless the model's own experts are there, and nothing but they."""
    if isinstance(site.module, PackedExperts):
        raise UsageError(f"{site.path} already uses packed experts", "restore() the model first")
    if site.adapted:
        raise UsageError(
            f"the experts {site.path} have an adapter, which packed experts would leave out",
            "merge it into the model and convert that, or let the adapter leave out experts",
        )


def check_elsewhere(site: Site, experts: Experts) -> None:
    """UsageError unless experts that are not among the packed ones are loaded."""
    missing = elsewhere(experts)
    if missing and site.own.device.type == "meta":
        raise UsageError(
            f"layer {site.layer} leaves experts {missing} to the model's own weights, which are "
            "not loaded",
            "load the model's experts, or convert all of them",
        )


def compare(site: Site, packed: PackedExperts, source: str | Path, has_settings: bool) -> bool:
    """Whether the model's own experts could be tried, which codes and shards cannot.

    UnlikeExperts where the first packed expert, of `source`, answers unlike the model's own;
    CheckpointError where that computes something else. Of modules of transformers settings have
    told what.
    """
    own = site.own
    if not own.runs:
        return False
    first = int((packed.experts.origins >= 0).argmax())
    token = trial_token(own.hidden, own.dtype)
    try:
        with torch.no_grad():
            theirs, ours = packed.compared(own, first, token)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the model's own experts {site.path} could not be tried: {first_line(error)}",
            "check that the model runs, and that its experts take hidden states, ids and weights",
        ) from error
    check_likeness(theirs, ours, site.layer, source)
    if not has_settings or isinstance(own, ListedExperts):
        check_function(own, theirs, first, token, packed.experts, site.layer)
    return True
