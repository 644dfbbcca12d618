"""A finished plan, and the figures that both the JSON document and the lines for people have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from ktconv.plan.cpu import PackedSide
from ktconv.plan.load import Load
from ktconv.plan.ranks import LayerPlacement, overall_evenness
from ktconv.plan.request import PlanRequest
from ktconv.plan.sizes import Model


class Planned(Struct, frozen=True):
    """Who holds what."""

    request: PlanRequest
    model: Model
    load: Load
    layers: Sequence[LayerPlacement]
    rank_bytes: Sequence[int]  # of experts, on each GPU of a rank
    cpu: PackedSide | None  # None: the method cannot have the model's sizes
    warnings: Sequence[str]

    @property
    def on_gpus(self) -> dict[int, list[int]]:
        """Ids of experts on GPUs by layer, ascending."""
        return {one.layer.index: one.copies.nonzero()[0].tolist() for one in self.layers}

    @property
    def gpu_experts(self) -> int:
        return sum(map(len, self.on_gpus.values()))

    @property
    def rank_loads(self) -> list[float]:
        """Share of the load of experts on GPUs that each rank has."""
        totals = np.sum([one.loads for one in self.layers], axis=0)
        return [float(one) / float(totals.sum() or 1) for one in totals]

    @property
    def rank_places(self) -> list[int]:
        """Places of experts, copies counted, on each rank."""
        return [
            sum(len(one.places[rank]) for one in self.layers) for rank in range(self.request.ep)
        ]

    @property
    def evenness(self) -> tuple[float, float]:
        """Mean over largest load of ranks, all layers together: linear and without copies, and as
        planned."""
        before = overall_evenness([one.loads_before for one in self.layers])
        return before, overall_evenness([one.loads for one in self.layers])
