"""The tensors next to experts that have a row, a column or a number for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ktconv.errors import CheckpointError
from ktconv.families.family import RouterSpec
from ktconv.families.names import NamesBeside, names_beside
from ktconv.source.encodings.unquantized import UNQUANTIZED
from ktconv.source.others import OtherWeights
from ktconv.source.pruning.kept import Kept
from ktconv.source.types import Checkpoint, MoELayer, TensorRef
from ktconv.system.units import counted

_BF16 = "give a checkpoint whose routers are in bf16 or float32"


class RouterCut(NamedTuple):
    """A tensor, of an axis of which the indices `kept` of `size` stay."""

    tensor: TensorRef
    axis: int
    size: int
    kept: tuple[int, ...]


class Routers:
    """The routers of a checkpoint, found by the names of all families."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._weights = OtherWeights(checkpoint)
        self._by_name: Mapping[str, TensorRef] = {one.name: one for one in checkpoint.other_tensors}
        self._aliases = checkpoint.aliases

    def spec(self, layer: MoELayer) -> RouterSpec | None:
        """The rule of the layer's router; None where it is not known."""
        names = self._names(layer).router
        try:
            corrected = self._first(names.correction) is not None
            return self._config.find_router(layer.index, corrected).spec
        except CheckpointError:  # not in the table, or config.json does not say enough of it
            return None

    def cuts(self, layer: MoELayer, kept: Kept) -> Iterator[RouterCut]:
        """Everything that is cut with the experts of a layer.

        CheckpointError where its router is not found, is stored with scales, or chooses experts by
        a table of tokens, and for a tensor whose size is not that of the layer.
        """
        spec, names = self.spec(layer), self._names(layer)
        if (spec is not None and spec.by_token) or self._first(names.router.table) is not None:
            raise CheckpointError(
                f"the router of layer {layer.index} takes experts from a table of tokens: none of "
                "them can be dropped",
                "keep all experts of the layers whose experts are chosen by a table",
            )
        identity, sinks = (spec.identity_experts, spec.sinks) if spec is not None else (0, 0)
        choosable = kept.experts + identity
        weight = self._first(names.router.weight)
        if weight is None:
            raise CheckpointError(
                f"{self._checkpoint.path} has no router of layer {layer.index} under a known name, "
                f"such as {names.router.weight[0]}, of which rows would be cut with the experts",
                "give the whole checkpoint; of a conversion whose experts have names of their own, "
                "prune the source, and convert that",
            )
        self._check_plain(weight)
        yield self._matrix(weight, layer, kept, identity, sinks)
        used = {weight.name}
        vectors = (
            (names.router.bias, choosable + sinks),
            (names.router.correction, choosable),
            (names.router.expert_scale, choosable),
        )
        for some, size in vectors:
            tensor = self._first(some)
            if tensor is None or tensor.name in used:
                continue
            used.add(tensor.name)
            if not tensor.shape or tensor.shape[-1] != size:
                raise _of_another_size(tensor, layer, kept)
            stay = (*kept.ids, *range(kept.experts, size))
            yield RouterCut(tensor, len(tensor.shape) - 1, size, stay)
        self._refuse_unknown(layer, kept, names, used)

    def _names(self, layer: MoELayer) -> NamesBeside:
        return names_beside(layer.source, self._config.family)

    def _first(self, names: Sequence[str]) -> TensorRef | None:
        own = (self._aliases.get(name, name) for name in names)
        return next(filter(None, map(self._by_name.get, own)), None)

    def _matrix(
        self, weight: TensorRef, layer: MoELayer, kept: Kept, identity: int, sinks: int
    ) -> RouterCut:
        rows = kept.experts + identity + sinks
        turned = self._config.checked.turned_router
        axes = (1, 0) if turned else (0, 1) if turned is None else (0,)
        fitting = [axis for axis in axes if len(weight.shape) == 2 and weight.shape[axis] == rows]
        if not fitting:
            raise _of_another_size(weight, layer, kept)
        stay = (*kept.ids, *range(kept.experts, rows))
        return RouterCut(weight, fitting[0], rows, stay)

    def _check_plain(self, weight: TensorRef) -> None:
        """CheckpointError for a router in an encoding whose rows have scales of their own."""
        parts = self._weights.find(weight.name)
        if parts is None or weight.file.suffix == ".gguf":
            return
        encoding = self._weights.matrix(parts).encoding
        if encoding not in UNQUANTIZED:
            raise CheckpointError(
                f"{weight.name} is a router in {encoding}, of which no rows can be cut", _BF16
            )

    def _refuse_unknown(
        self, layer: MoELayer, kept: Kept, names: NamesBeside, used: set[str]
    ) -> None:
        """CheckpointError for a further vector in the experts' block with a number for each."""
        sizes = {setting.value for setting in self._config.checked.widths}
        sizes |= {layer.hidden_size, layer.intermediate_size}
        if kept.experts in sizes or kept.experts == 1:
            return  # such a vector may be of anything
        for name, tensor in self._by_name.items():
            inside = name.startswith((f"{names.block}.", f"{layer.source}."))
            if inside and name not in used and tensor.shape == (kept.experts,):
                raise CheckpointError(
                    f"{name} has a number for each of the {counted(kept.experts, 'expert')} of "
                    f"layer {layer.index}, and ktconv does not know what it is",
                    "open an issue with the output of ktconv inspect",
                )


def _of_another_size(tensor: TensorRef, layer: MoELayer, kept: Kept) -> CheckpointError:
    return CheckpointError(
        f"{tensor.name} has the shape {list(tensor.shape)}, which has no axis for the "
        f"{counted(kept.experts, 'expert')} of layer {layer.index}",
        "check that config.json and the weights belong to one checkpoint",
    )
