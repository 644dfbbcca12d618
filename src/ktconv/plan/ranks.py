"""GPUs and their experts: the places of each layer, their load, and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.plan.load import Load
from ktconv.plan.placement.balance import balance, even_copies
from ktconv.plan.placement.parallel import Placement, placed
from ktconv.plan.sizes import Layer, Model
from ktconv.system.arrays import F64, I64
from ktconv.system.units import counted

Ids = Mapping[int, Sequence[int]]  # experts by layer, ascending
Sizes = Mapping[int, Mapping[int, int]]  # bytes by layer and expert


class LayerPlacement(Struct, frozen=True):
    """The experts of a layer that are on GPUs, by the rank that holds them."""

    layer: Layer
    places: Sequence[Sequence[int]]  # by rank: ids, in their order there
    before: Sequence[Sequence[int]]  # the same, linear and without copies
    load: F64  # [E]

    @property
    def copies(self) -> I64:
        """int64 [E]: 0 for experts that are on no GPU."""
        ids = [one for rank in self.places for one in rank]
        return np.bincount(np.array(ids, np.int64), minlength=self.layer.experts)

    @property
    def cold(self) -> list[int]:
        """Experts that are there, but on no GPU."""
        copies = self.copies
        return [one for one in self.layer.ids if not copies[one]]

    @property
    def loads(self) -> F64:
        """float64 [ranks]: copies take equal parts of their expert's load."""
        return self._loads(self.places, self.copies)

    @property
    def loads_before(self) -> F64:
        return self._loads(self.before, np.ones(self.layer.experts, np.int64))

    def _loads(self, places: Sequence[Sequence[int]], copies: I64) -> F64:
        share = self.load / np.maximum(copies, 1)
        return np.array([share[list(rank)].sum() for rank in places])


def place_in_turn(
    model: Model, ids: Ids, load: Load, ep: int, placement: Placement
) -> list[LayerPlacement]:
    """Experts `ids` of each layer, linear or round robin."""
    return [
        LayerPlacement(
            layer,
            placed(ids[layer.index], ep, placement),
            placed(ids[layer.index], ep, "linear"),
            load.layers[layer.index],
        )
        for layer in model.layers
    ]


def place_balanced(
    model: Model, load: Load, ep: int, redundant: int, nodes: int
) -> list[LayerPlacement]:
    """All experts, the busiest several times. UsageError where a layer's places cannot be shared
    out evenly."""
    found: dict[int, LayerPlacement] = {}
    for count, layers in _by_count(model.layers).items():
        if (count + redundant) % ep:
            raise UsageError(
                f"{counted(count, 'expert')} of layer {layers[0].index} and "
                f"{counted(redundant, 'copy')} cannot be "
                f"shared out evenly by {ep} GPUs, which --placement balanced does",
                "add --redundant {} or {}".format(*even_copies(count, ep)),
            )
        groups = {model.groups(one.index) if count == one.experts else 1 for one in layers}
        loads = np.array([load.layers[one.index][list(one.ids)] for one in layers])
        tables = balance(loads, count + redundant, min(groups), nodes, ep)
        for layer, slots in zip(layers, tables.physical_to_logical, strict=True):
            ids = np.array(layer.ids)[slots].reshape(ep, -1).tolist()
            before = placed(layer.ids, ep, "linear")
            found[layer.index] = LayerPlacement(layer, ids, before, load.layers[layer.index])
    return [found[layer.index] for layer in model.layers]


def _by_count(layers: Iterable[Layer]) -> dict[int, list[Layer]]:
    """Layers with equal numbers of experts are balanced in one call."""
    found: dict[int, list[Layer]] = defaultdict(list)
    for layer in layers:
        found[len(layer.ids)].append(layer)
    return found


def cut_sizes(model: Model, tp: int) -> Sizes:
    """Bytes of each expert on each of `tp` GPUs."""
    return {
        layer.index: dict(zip(layer.ids, model.expert_bytes(layer, tp), strict=True))
        for layer in model.layers
    }


def rank_bytes(placements: Sequence[LayerPlacement], sizes: Sizes) -> list[int]:
    """Bytes of experts on each GPU of a rank, by rank."""
    totals = [0] * len(placements[0].places)
    for one in placements:
        size = sizes[one.layer.index]
        for rank, ids in enumerate(one.places):
            totals[rank] += sum(size[expert] for expert in ids)
    return totals


def overall_evenness(loads: Sequence[F64]) -> float:
    """Evenness over `loads` by layer, [ranks] each: layers follow one another, so that the sum of
    the mean loads over the sum of the largest is the share of time in which GPUs work."""
    most = sum(float(one.max()) for one in loads)
    return sum(float(one.mean()) for one in loads) / most if most else 1.0
