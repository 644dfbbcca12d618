"""Experts that are a list of modules, one for each, with linear layers for their matrices: those of
transformers 4 and of many models that are written by hand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ktconv.families import table
from ktconv.families.family import UNGATED, USUAL, Projection
from ktconv.model.own import Call, OwnExperts

_ADAPTED = "base_layer"  # a linear layer under an adapter, as PEFT calls it


class ListedExperts(OwnExperts):
    """The experts that are elements of `module`. Identities follow those that have matrices."""

    def __init__(self, module: nn.ModuleList, linear: Sequence[Mapping[Projection, Any]]) -> None:
        self.module: nn.ModuleList = module
        self._linear = linear
        self.count, self._identities = len(linear), len(module) - len(linear)
        self.intermediate, self.hidden = _sizes(linear[0])["down"]

    @property
    def call(self) -> Call | None:
        if type(self.module).forward is not nn.Module.forward:
            return "routed" if _arguments(self.module) == 3 else None
        return "each" if all(_arguments(one) == 1 for one in self.module) else None

    @property
    def gated(self) -> bool:
        return "gate" in self._linear[0]

    @property
    def biased(self) -> bool:
        return bool(self.biases(0))

    @property
    def weights(self) -> Iterator[Tensor]:
        for expert in range(self.count):
            yield from self.matrices(expert).values()
            yield from self.biases(expert).values()

    @property
    def identities(self) -> int:
        return self._identities

    @property
    def names(self) -> dict[Projection, str]:
        children = self.module[0].named_children()
        spelt = {id(getattr(one, _ADAPTED, one)): name for name, one in children}
        return {projection: spelt[id(one)] for projection, one in self._linear[0].items()}

    @property
    def adapted(self) -> bool:
        return any(hasattr(one, _ADAPTED) for one in self.module.modules())

    def matrices(self, expert: int) -> dict[Projection, Tensor]:
        return {name: one.weight for name, one in self._linear[expert].items()}

    def biases(self, expert: int) -> dict[Projection, Tensor]:
        linear = self._linear[expert].items()
        return {name: one.bias for name, one in linear if one.bias is not None}


def listed_in(module: nn.Module) -> ListedExperts | None:
    """The experts that are elements of a list: each with the same linear layers and nothing else,
    under names that a family has. None for other modules."""
    if not isinstance(module, nn.ModuleList):
        return None
    found = []
    for one in module:
        linear = None if one is None else _projections(one)
        if linear is None:
            break
        found.append(linear)
    sizes = [_sizes(linear) for linear in found]
    if len(found) < 2 or sizes.count(sizes[0]) < len(sizes):
        return None
    rest = list(module)[len(found) :]
    alone = all(isinstance(one, nn.Identity) for one in rest)
    return ListedExperts(module, found) if alone else None


def _projections(expert: nn.Module) -> dict[Projection, Any] | None:
    """The linear layers of an expert by what they are; None for another module, and for one with
    parameters besides them."""
    linear, rest = dict[str, nn.Module](), list(expert.parameters(recurse=False))
    for name, child in expert.named_children():
        bare = getattr(child, _ADAPTED, child)
        if _is_linear(bare):
            linear[name] = bare
        else:
            rest += child.parameters()
    for spelling in () if rest else _spellings():
        if linear.keys() == spelling.keys():
            found = {spelling[name]: linear[name] for name in spelling}
            return found if _fits(_sizes(found)) else None
    return None


def _spellings() -> Iterator[Mapping[str, Projection]]:
    """Names -> what they are, of all matrices of an expert."""
    yield from (one.projections for one in table.FAMILIES.matrices if one.gate)
    yield {USUAL.of(projection): projection for projection in UNGATED}


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or one of a library that keeps its weights in another
    way."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return all(isinstance(size, int) for size in sizes) and hasattr(module, "weight")


def _sizes(linear: Mapping[Projection, Any]) -> dict[Projection, tuple[int, int]]:
    """Inputs and outputs."""
    return {name: (one.in_features, one.out_features) for name, one in linear.items()}


def _fits(sizes: Mapping[Projection, tuple[int, int]]) -> bool:
    turned = sizes["down"][::-1]
    return all(size == turned for name, size in sizes.items() if name != "down")


def _arguments(module: nn.Module) -> int:
    """Number of arguments that a call needs."""
    given = inspect.signature(module.forward).parameters.values()
    return sum(one.default is one.empty and one.kind is not one.VAR_KEYWORD for one in given)
