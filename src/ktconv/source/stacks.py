"""Expert tensors found by the structure of their names, whatever the model is called.

A stack is everything under one `...layers.{L}.{block}.experts`: the experts of one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from ktconv.families import table
from ktconv.families.names import (
    ExpertsPath,
    block_of,
    is_of_other_experts,
    parse_source,
    split_name,
)
from ktconv.source.naming_map import Order, Stored
from ktconv.source.types import TensorRef

# For names that no family has.
MAP_HINT = "`ktconv inspect MODEL --explain` prints a map for other names (docs/maps.md)"


class Stack(Struct):
    """The expert tensors of one layer, keyed by what follows `source` and a dot."""

    path: ExpertsPath
    tensors: dict[str, TensorRef] = field(default_factory=dict)
    order: Order | None = None  # of gate and up in one tensor, where a map says it
    stored: Stored | None = None
    latent: frozenset[int] = frozenset()  # sizes of projections beside them into or out of a width

    @property
    def source(self) -> str:
        """model.layers.3.mlp.experts"""
        return self.path.source


class Split(Struct, frozen=True):
    """The tensors of a checkpoint, parted into experts and the rest."""

    stacks: Sequence[Stack]
    others: list[TensorRef]
    unrecognised: Sequence[str]  # names in `others` that have experts in an unknown place


def split_tensors(tensors: Iterable[TensorRef]) -> Split:
    """Part routed-expert tensors from all others; shared experts are others."""
    stacks: dict[str, Stack | None] = {}
    others: list[TensorRef] = []
    unrecognised: list[str] = []
    usual = f".{table.FAMILIES.containers[0]}"
    dotted = f"{usual}."
    for tensor in tensors:
        # What is nearly always so, without a call for each of a million tensors.
        source, found, rest = tensor.name.partition(dotted)
        if found:
            source += usual
        elif parts := split_name(tensor.name):
            source, rest = parts
        else:
            others.append(tensor)
            continue
        # One regular expression per layer and not per tensor: there may be 100 000.
        if source not in stacks:
            path = parse_source(source)
            stacks[source] = None if path is None else Stack(path)
        stack = stacks[source]
        if stack is None:
            others.append(tensor)
            if not is_of_other_experts(source):
                unrecognised.append(tensor.name)
        else:
            stack.tensors[rest] = tensor
    found_stacks = []
    for stack in stacks.values():
        if stack is None:
            continue
        for rest in table.FAMILIES.beside:
            if rest in stack.tensors:
                others.append(stack.tensors.pop(rest))
        if stack.tensors:
            found_stacks.append(stack)
    latent = _latent(others)
    for stack in found_stacks if latent else ():
        stack.latent = latent.get(block_of(stack.source) or "", frozenset())
    return Split(found_stacks, others, unrecognised)


def _latent(others: Iterable[TensorRef]) -> dict[str, frozenset[int]]:
    """Sizes of the projections in a block, by block, from a model's width to its experts'."""
    known, found = frozenset(table.FAMILIES.latent), dict[str, frozenset[int]]()
    for tensor in others:
        block, *rest = tensor.name.rsplit(".", 2)
        if rest and rest[0] in known:
            found[block] = found.get(block, frozenset()).union(tensor.shape)
    return found
