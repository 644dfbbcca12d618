"""Devices of a model: finds that of its routed experts, and moves its other parts to another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.model.module import PackedExperts
from ktconv.model.sites import Site, find_experts
from ktconv.system.units import format_ranges


class Moved(Struct, frozen=True):
    """Bytes that `move_non_experts` found: `moved` to the device, `there` already, and `experts`
    that stay where they are, packed ones included."""

    moved: int
    there: int
    experts: int


def expert_device(model: nn.Module) -> torch.device:
    """Device of a model's routed experts, its own or packed ones (these are on the CPU).

    Raises CheckpointError where there are none, or on several devices: it names their layers.
    """
    places: dict[torch.device, list[int]] = {}
    for layer, site in sorted(find_experts(model).items()):
        for device in _devices(site):
            places.setdefault(device, []).append(layer)
    if len(places) > 1:
        listed = (f"{place} (layers {format_ranges(layers)})" for place, layers in places.items())
        raise CheckpointError(f"the model has experts on several devices: {', '.join(listed)}")
    return next(iter(places))


def move_non_experts(model: nn.Module, device: str | torch.device) -> Moved:
    """Move all parameters and buffers of `model` to `device`, but for matrices and biases of routed
    experts; these, the model's own or packed ones with their LoRA, stay where they are.

    Parameters stay the objects that they are, so that tied ones stay tied. Raises CheckpointError
    where no experts are found, UsageError for a device that cannot be used, and for parameters
    without values (meta), which cannot be moved; then nothing has moved.
    """
    target, sites = _usable(device), find_experts(model).values()
    own = list(chain.from_iterable(map(_weights, sites)))
    kept = {id(one) for one in own}
    places = _places(model)
    others = [found[0].tensor for number, found in places.items() if number not in kept]
    if target.type != "meta":
        _check_values(model, others)
    there = _nbytes(one for one in others if one.device == target)
    moved = _nbytes(others) - there
    experts = [place for number in kept for place in places.get(number, ())]
    for place in experts:
        place.put(None)
    try:
        model.to(target)
    finally:
        for place in experts:
            place.put(place.tensor)
    for number in places.keys() - kept:
        # `Module.to` moves a buffer once for each place that has it, and so it does with a
        # parameter if the device has tensors of another kind.
        first = places[number][0]
        for place in places[number][1:]:
            place.put(first.tensors[first.name])
    packed = sum(site.module.nbytes for site in sites if isinstance(site.module, PackedExperts))
    return Moved(moved, there, _nbytes(own) + packed)


def _weights(site: Site) -> Iterator[Tensor]:
    """Parameters of the experts: of packed ones those of their LoRA."""
    module = site.module
    if not isinstance(module, PackedExperts):
        return site.own.weights
    return iter(()) if module.lora is None else module.lora.parameters()


def _devices(site: Site) -> set[torch.device]:
    module = site.module
    if not isinstance(module, PackedExperts):
        return site.own.devices
    return {torch.device("cpu")}.union(*(own.devices for own in module.own))


def _usable(device: str | torch.device) -> torch.device:
    """A device with its number, as tensors say it; UsageError for one that this PyTorch does not
    have."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter of a PyTorch without CUDA
        why = str(error).splitlines()[0]
        raise UsageError(f"the device {device} cannot be used: {why}") from None


class _Place(NamedTuple):
    """A module and the name of a parameter or buffer in it."""

    tensors: dict[str, Any]  # of a module, its parameters or its buffers
    name: str
    tensor: Tensor

    def put(self, tensor: Tensor | None) -> None:
        self.tensors[self.name] = tensor


def _places(model: nn.Module) -> dict[int, list[_Place]]:
    """Places of parameters and buffers by their tensors' ids: tied ones have several."""
    found: dict[int, list[_Place]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, one in tensors.items():
                if one is not None:
                    found.setdefault(id(one), []).append(_Place(tensors, name, one))
    return found


def _check_values(model: nn.Module, tensors: Iterable[Tensor]) -> None:
    empty = {id(one) for one in tensors if one.is_meta}
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if id(one) in empty:
            raise UsageError(
                f"{name} has no values that could be moved (it is on meta)",
                "load all of the model but its experts",
            )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Tied ones count once."""
    return sum({id(one): one.numel() * one.element_size() for one in tensors}.values())
