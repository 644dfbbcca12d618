"""The tensors of a checkpoint's experts as they are stored, with those of dropped ones cut out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktconv.errors import CheckpointError, UsageError
from ktconv.source.pruning.kept import Kept
from ktconv.source.pruning.view import PrunedView
from ktconv.source.shards import read_shards, select_shards
from ktconv.source.stacks import split_tensors
from ktconv.source.types import MoELayer, TensorRef
from ktconv.system.units import counted

Named = tuple[TensorRef, str]  # a tensor, and its name in the output
_CONVERT = "convert it with --prune FILE, where FILE is what ktconv prune --write makes"


def expert_tensors(view: PrunedView) -> Mapping[int, Sequence[Named]]:
    """All tensors under the names of experts, by layer, also those that no conversion reads.

    CheckpointError for a tensor of which no part can be said to be an expert's, and for models
    whose tensors have not the names that are written: GGUF, with a map, with adapters.
    """
    base = view.base
    why = (
        (base.is_gguf, "is a GGUF model, which is read and not written"),
        (base.mapped is not None, "is read with a map of names"),
        (bool(base.adapters), "is read with adapters, whose sums are not stored"),
    )
    for applies, words in why:
        if applies:
            raise UsageError(f"{base.path} {words}: its bytes cannot be copied", _CONVERT)
    others = {one.name for one in base.other_tensors}
    layers = {layer.source: layer for layer in view.layers}
    left_out = {layer.source for layer in base.layers} - layers.keys()
    found: dict[int, list[Named]] = {layer.index: [] for layer in view.layers}
    split = split_tensors(read_shards(select_shards(base.path)).tensors)
    for stack in split.stacks:
        if stack.source in left_out:
            continue
        for tensor in stack.tensors.values():
            if tensor.name not in others:
                layer = layers[stack.source]
                found[layer.index] += _cut(view, layer, tensor)
    return found


def _cut(view: PrunedView, layer: MoELayer, tensor: TensorRef) -> list[Named]:
    """The part of a tensor that stays; an empty list for one of an expert that goes."""
    kept = view.kept(layer)
    words = tensor.name.removeprefix(f"{layer.source}.").split(".")
    if any(word.isdecimal() for word in words[:2]):
        name = view.renumbered(tensor.name, layer)
        return [] if name is None else [(tensor, name)]
    if len(kept.ids) == kept.experts or not tensor.shape or tensor.shape == (1,):
        return [(tensor, tensor.name)]
    count = _count(view, tensor, kept)
    stay = (*kept.ids, *range(kept.experts, count))
    return [(view.files.add(tensor, 0, count, stay), tensor.name)]


def _count(view: PrunedView, tensor: TensorRef, kept: Kept) -> int:
    """The number of experts along the first axis, with those that return their input (LongCat)."""
    size = tensor.shape[0]
    every = kept.experts + view.base.config.checked.zero_experts
    if size == every:
        return every
    if size % kept.experts:
        raise CheckpointError(
            f"{tensor.name} has the shape {list(tensor.shape)}, of which no part is that of one of "
            f"{counted(kept.experts, 'expert')}",
            _CONVERT,
        )
    return kept.experts
