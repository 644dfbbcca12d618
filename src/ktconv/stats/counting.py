"""Counts the choices of a model's routers while it reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ktconv.errors import CheckpointError
from ktconv.stats.counts import LayerCounts
from ktconv.system.arrays import I32, I64, Array

if TYPE_CHECKING:
    from torch import Tensor


class CountTap:
    """Counts of the layers of `experts`, which has their numbers; with `keep` also the chosen ids.

    `apart`: layers that get the tokens of each expert one after the other, see `joined`.
    """

    wants_inputs = False

    def __init__(
        self, experts: Mapping[int, int], *, apart: Collection[int] = (), keep: bool = False
    ) -> None:
        self._experts, self._apart, self._keep = experts, apart, keep
        self._counts: dict[int, I64] = {}
        self._tokens: dict[int, int] = {}
        self._ids: dict[int, list[I32]] = {}

    def chosen(self, layer: int, window: int, ids: Tensor, weights: Tensor) -> None:
        """Add a window's choices [M, K], if the layer is one of those that are counted."""
        if layer not in self._experts:
            return
        experts = self._experts[layer]
        found = chosen_ids(ids, weights, experts)
        if layer in self._apart:
            found = joined(found, experts)
        counts = self._counts.setdefault(layer, np.zeros(experts, np.int64))
        counts += np.bincount(found[found >= 0], minlength=experts)
        self._tokens[layer] = self._tokens.get(layer, 0) + len(found)
        if self._keep:
            self._ids.setdefault(layer, []).append(found)

    def inputs(self, layer: int, expert: int, rows: Tensor, inner: Tensor, weights: Tensor) -> None:
        pass

    def layer_done(self, layer: int) -> None:
        pass

    def state(self) -> Mapping[str, Array]:
        """State by layer: counts with the tokens in front, and the ids."""
        arrays: dict[str, Array] = {}
        for layer, counts in self._counts.items():
            arrays[f"counts.{layer}"] = np.concatenate([[self._tokens[layer]], counts])
            if self._keep:
                arrays[f"ids.{layer}"] = self.ids[layer]
        return arrays

    def restore(self, state: Mapping[str, Array]) -> None:
        for name, array in state.items():
            kind, layer = name.split(".")
            if kind == "ids":
                self._ids[int(layer)] = [array]
            else:
                self._tokens[int(layer)], self._counts[int(layer)] = int(array[0]), array[1:].copy()

    @property
    def layers(self) -> list[LayerCounts]:
        """CheckpointError for a layer whose experts were never called."""
        for layer in self._experts:
            if layer not in self._counts or not self._counts[layer].any():
                raise CheckpointError(f"the model did not call layer {layer}'s experts")
        return [LayerCounts(n, self._tokens[n], self._counts[n]) for n in sorted(self._experts)]

    @property
    def ids(self) -> dict[int, I32]:
        """Chosen experts [tokens, K] by layer, in the order of the text; -1 for none."""
        return {layer: np.concatenate(found) for layer, found in sorted(self._ids.items())}


def chosen_ids(ids: Tensor, weights: Tensor, experts: int) -> I32:
    """Chosen experts [M, K]; -1 where a token chose fewer, or one without matrices, as LongCat's
    that return their input and Zaya's that does nothing (some expert with weight 0)."""
    found: I32 = ids.cpu().numpy().astype(np.int32)  # a copy
    found[(found < 0) | (found >= experts)] = -1
    found[(weights.reshape(found.shape) == 0).cpu().numpy()] = -1
    return found


def joined(ids: I32, experts: int) -> I32:
    """Chosen experts [M, K] of ids [E * M, 1], in which all tokens come once for every expert, with
    its id or -1 (Llama 4); K is the most that a token has."""
    of_token = np.sort(np.where(ids < 0, experts, ids).reshape(experts, -1).T, axis=1)
    most = int((of_token < experts).sum(axis=1).max())
    return np.where(of_token < experts, of_token, -1).astype(np.int32)[:, :most]
