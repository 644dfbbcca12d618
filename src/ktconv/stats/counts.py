"""Counts of chosen experts and statistics of them; NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.system.arrays import I64
from ktconv.system.units import counted
from ktconv.targets.expert_sets import COUNTS, ExpertSet, expert_set
from ktconv.targets.hot import hot_experts, padded

SCHEMA = 1
NUM_LAYERS = "num_hidden_layers"  # of the model, dense layers included


class LayerCounts(Struct, frozen=True):
    """One layer: `counts[e]` is how many of `tokens` tokens were routed to expert e."""

    layer: int
    tokens: int
    counts: I64

    @property
    def experts(self) -> int:
        return len(self.counts)

    @property
    def routed(self) -> int:
        """Choices in all: tokens times experts per token."""
        return int(self.counts.sum())

    @property
    def order(self) -> I64:
        """Ids, most used first; of equally used ones the lower first."""
        return np.argsort(-self.counts, kind="stable")

    @property
    def never(self) -> list[int]:
        """Experts that no token was routed to."""
        return [int(expert) for expert in np.flatnonzero(self.counts == 0)]

    @property
    def balance(self) -> float:
        """Entropy of the shares over that of equal ones: 1 is even, 0 is one expert alone."""
        shares = self.counts[self.counts > 0] / self.routed
        entropy = float(-(shares * np.log(shares)).sum())
        return entropy / math.log(self.experts) if self.experts > 1 else 1.0

    def share(self, ids: Sequence[int] | I64) -> float:
        """Share of all choices that fell on these experts."""
        return int(self.counts[np.asarray(ids, np.int64)].sum()) / self.routed

    def hottest(self, number: int) -> list[int]:
        """The `number` most used experts, most used first."""
        return [int(expert) for expert in self.order[:number]]

    def hottest_with_share(self, share: float) -> list[int]:
        """The fewest experts that together take at least this share."""
        reached = np.cumsum(self.counts[self.order])
        number = int(np.searchsorted(reached, share * self.routed * (1 - 1e-12))) + 1
        return self.hottest(number)

    def facts(self, hot: Sequence[int]) -> dict[str, Any]:
        """The JSON of this layer; `hot` are the experts that were asked for."""
        order = self.order
        most, least = (
            {"expert": int(e), "count": int(self.counts[e]), "share": self.share([int(e)])}
            for e in (order[0], order[-1])
        )
        return {
            "layer": self.layer,
            "tokens": self.tokens,
            "experts": self.experts,
            "routed": self.routed,
            "counts": self.counts.tolist(),
            "most_used": most,
            "least_used": least,
            "never_used": self.never,
            "balance": self.balance,
            "hot": sorted(hot),
            "hot_share": self.share(hot),
        }


class Statistics(Struct, frozen=True):
    """All layers, ascending. `about` says of which model and text."""

    layers: Sequence[LayerCounts]
    about: Mapping[str, Any]

    def chosen(
        self, hot: int | None, share: float | None, total: int | None = None
    ) -> dict[int, list[int]]:
        """The `hot` most used experts by layer, the fewest that take `share`, or those among the
        `total` most used of all layers; by default a quarter of each layer. Most used first.
        UsageError for more than there are."""
        if total is not None:
            return self._hottest_of_all(total)
        for layer in self.layers:
            if hot is not None and hot > layer.experts:
                raise UsageError(
                    f"--hot {hot} is more than the {counted(layer.experts, 'expert')} of layer "
                    f"{layer.layer}",
                    f"use at most {layer.experts}",
                )
        if share is not None:
            return {layer.layer: layer.hottest_with_share(share) for layer in self.layers}
        quarter = {layer.layer: max(1, layer.experts // 4) for layer in self.layers}
        return {one.layer: one.hottest(hot or quarter[one.layer]) for one in self.layers}

    def _hottest_of_all(self, total: int) -> dict[int, list[int]]:
        """The hottest experts of all layers, as sglang-kt places them by frequency; of equally used
        ones the lower layer and id."""
        experts = [one.experts for one in self.layers]
        if total > sum(experts):
            raise UsageError(
                f"--hot-total {total} is more than the {counted(sum(experts), 'expert')} of all "
                "layers",
                f"use at most {sum(experts)}",
            )
        chosen = hot_experts(padded([one.counts for one in self.layers]), total, experts=experts)
        numbers = chosen.sum(axis=1).tolist()
        return {one.layer: one.hottest(n) for one, n in zip(self.layers, numbers, strict=True)}

    def tied(self, total: int) -> int:
        """Experts beyond the `total` most used of all layers that are used as often as the last
        of these: another way to sort could take them."""
        counts = np.sort(np.concatenate([layer.counts for layer in self.layers]))[::-1]
        return int(np.count_nonzero(counts[total:] == counts[total - 1]))

    def hot(
        self, hot: int | None = None, share: float | None = None, total: int | None = None
    ) -> ExpertSet:
        """The chosen experts as the set of --experts and --exclude-experts."""
        counts = {one.layer: one.experts for one in self.layers}
        return expert_set(self.chosen(hot, share, total), counts)

    def only(self, wanted: Sequence[int]) -> Statistics:
        """Some layers. UsageError for one that is not there."""
        there = {layer.layer: layer for layer in self.layers}
        check_layers(wanted, there)
        return Statistics([there[number] for number in wanted], self.about)

    def facts(
        self, hot: int | None, share: float | None, total: int | None = None
    ) -> dict[str, Any]:
        """The JSON document of `ktconv stats --json`."""
        chosen = self.chosen(hot, share, total)
        routed = sum(layer.routed for layer in self.layers)
        taken = sum(layer.share(chosen[layer.layer]) * layer.routed for layer in self.layers)
        return {
            "schema": SCHEMA,
            "kind": COUNTS,
            **self.about,
            "hot_experts": sum(map(len, chosen.values())),
            "experts": sum(layer.experts for layer in self.layers),
            "hot_share": taken / routed,
            "layers": [layer.facts(chosen[layer.layer]) for layer in self.layers],
        }


def check_layers(wanted: Iterable[int], there: Iterable[int]) -> None:
    """UsageError for a wanted layer that is not there."""
    known = list(there)
    for number in wanted:
        if number not in known:
            raise UsageError(
                f"--layers names layer {number}, which has no routed experts",
                f"layers with routed experts: {', '.join(map(str, known))}",
            )


def from_facts(content: Mapping[str, Any], path: Path) -> Statistics:
    """Counts as an earlier `ktconv stats --json` printed them. UsageError for anything else."""
    keys = ("model", "model_type", NUM_LAYERS, "text", "tokens")
    about = {key: content.get(key) for key in keys}
    try:
        layers = [_layer(about) for about in content["layers"]]
        if content["schema"] != SCHEMA or not layers:
            raise ValueError
        if [one.layer for one in layers] != sorted({one.layer for one in layers}):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{path} is not a complete report of ktconv stats", "record it again with --json"
        ) from None
    return Statistics(layers, about)


def _layer(about: Mapping[str, Any]) -> LayerCounts:
    numbers = [about["layer"], about["tokens"], *about["counts"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError
    found = LayerCounts(about["layer"], about["tokens"], np.array(about["counts"], np.int64))
    if not found.routed or found.counts.max() > found.tokens:
        raise ValueError
    return found
