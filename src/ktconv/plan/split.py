"""Hot and cold: which experts run on GPUs, and how many fit there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ktconv.errors import UsageError
from ktconv.plan.load import Load
from ktconv.plan.ranks import Ids, LayerPlacement, Sizes, place_in_turn, rank_bytes
from ktconv.plan.request import Hot, PlanRequest, parse_hot
from ktconv.plan.sizes import Model
from ktconv.system.arrays import Bools
from ktconv.system.units import counted, format_size
from ktconv.targets.hot import hot_experts, padded


class Split:
    """Chooses experts for GPUs, the most used first."""

    def __init__(self, model: Model, load: Load, request: PlanRequest, sizes: Sizes) -> None:
        self._model, self._load, self._request, self._sizes = model, load, request, sizes
        # Only experts that are there count: of an output without its hot experts, the others.
        rows = [load.layers[one.index][list(one.ids)] for one in model.layers]
        self._counts = [len(row) for row in rows]
        self._table = padded(rows)

    def chosen(self) -> list[LayerPlacement]:
        """Placements as the request says: with that number of hot experts, or as many as fit.
        UsageError for more than fit."""
        request = self._request
        if request.hot is None:
            return self.placements(Hot(self._most_that_fit()))
        hot = parse_hot(request.hot)
        most = max(self._counts) if request.per_layer else self._model.count
        if hot.number is not None and hot.number > most:
            where = "of a layer" if request.per_layer else "of all layers"
            raise UsageError(
                f"--hot {hot.number} is more than the {counted(most, 'expert')} {where}",
                f"use at most {most}",
            )
        placements = self.placements(hot)
        if not any(len(rank) for one in placements for rank in one.places):
            raise UsageError(f"--hot {request.hot} is no expert at all", "choose more of them")
        if not self._fits(placements):
            raise UsageError(
                f"--hot {request.hot} does not fit: a GPU would hold "
                f"{format_size(self._bytes(placements))}, more than --gpu-memory "
                f"{format_size(request.gpu_memory or 0)}",
                f"the largest number that fits is {self._most_that_fit()}",
            )
        return placements

    def placements(self, hot: Hot) -> list[LayerPlacement]:
        request = self._request
        assert request.placed != "balanced"
        return place_in_turn(self._model, self._ids(hot), self._load, request.ep, request.placed)

    def _ids(self, hot: Hot) -> Ids:
        masks = self._masks(hot)
        return {
            layer.index: np.array(layer.ids)[mask[: len(layer.ids)]].tolist()
            for layer, mask in zip(self._model.layers, masks, strict=True)
        }

    def _masks(self, hot: Hot) -> Sequence[Bools]:
        """Masks of hot experts, by layer, of the experts that are there."""
        if not self._request.per_layer:
            return list(hot_experts(self._table, hot.of(sum(self._counts)), False, self._counts))
        return [
            hot_experts(row[None], hot.of(count), True, [count])[0]
            for row, count in zip(self._table, self._counts, strict=True)
        ]

    # ---- memory ----

    def _bytes(self, placements: Sequence[LayerPlacement]) -> int:
        """Bytes of the GPU that holds most."""
        return self._model.other_bytes + max(rank_bytes(placements, self._sizes))

    def _fits(self, placements: Sequence[LayerPlacement]) -> bool:
        return (
            self._request.gpu_memory is None or self._bytes(placements) <= self._request.gpu_memory
        )

    def _most_that_fit(self) -> int:
        """The largest number of experts, of all layers or of each, that fits; found by halves, as
        the fullest GPU never has less of more experts."""
        check_others(self._model, self._request)
        most = max(self._counts) if self._request.per_layer else self._model.count
        return bisect_left(
            range(1, most + 1), True, key=lambda n: not self._fits(self.placements(Hot(n)))
        )


def check_others(model: Model, request: PlanRequest) -> None:
    """UsageError if a GPU has no room for what every GPU holds."""
    memory = request.gpu_memory
    if memory is not None and model.other_bytes > memory:
        raise UsageError(
            f"tensors that are not experts take {format_size(model.other_bytes)}, more than "
            f"--gpu-memory {format_size(memory)}",
            "give the memory that one GPU has for weights, or use larger GPUs",
        )


def check_memory(model: Model, request: PlanRequest, totals: Sequence[int]) -> None:
    """UsageError if balanced experts do not fit."""
    memory, most = request.gpu_memory, model.other_bytes + max(totals)
    if memory is not None and most > memory:
        raise UsageError(
            f"a GPU would hold {format_size(most)}, more than --gpu-memory {format_size(memory)}",
            "use more GPUs or fewer copies, or place hot experts only, with linear or round_robin",
        )


def hot_share(placements: Sequence[LayerPlacement]) -> float:
    """Fraction of routed tokens that go to experts on GPUs, by load."""
    taken = sum(float(one.load[one.copies > 0].sum()) for one in placements)
    routed = sum(float(one.load[list(one.layer.ids)].sum()) for one in placements)
    return taken / routed if routed else 0.0
