"""Calls of experts by the layers of a streamed model, and the interface of those that answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct
from torch import Tensor

from ktconv.model.sites import Site
from ktconv.model.stored import StoredExperts
from ktconv.source import MoELayer
from ktconv.system.arrays import Array


class Call(Struct, frozen=True):
    """One window's tokens before the experts of a layer, of one side (0: the source, 1: the
    converted model)."""

    side: int
    window: int
    rows: Tensor  # [M, H], in the dtype of the model
    ids: Tensor  # int64 [M, K], -1: no expert
    weights: Tensor  # [M, K]


class ExpertLayer(Struct, frozen=True):
    """A layer whose experts are asked.

    `site` is where the model has them, on the meta device. `source` is where the checkpoint has
    them.
    """

    index: int
    site: Site
    source: MoELayer
    own: StoredExperts  # of `site`, whatever is in their place later

    @staticmethod
    def at(index: int, site: Site, source: MoELayer) -> ExpertLayer:
        return ExpertLayer(index, site, source, site.stored)


class Resumable(Protocol):
    """An object with a state that is kept at each boundary of layers; by default there is none."""

    def state(self) -> Mapping[str, Array]:
        """State from which a later run goes on behind the layers that were run."""
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """The contrary of `state`, before the first layer."""
        return


class ExpertRunner(Resumable, Protocol):
    """Computes the experts of one layer after the other for all windows."""

    def run(self, layer: ExpertLayer, calls: Sequence[Call], outputs: Sequence[Tensor]) -> None:
        """Add to each of `outputs` [M, H], which are zeros of the dtype of `rows`, the sum over
        the experts of each token, times their weights. Raises KtconvError."""

    def ahead(self, layer: MoELayer) -> None:
        """Before `run`: the experts of this layer are asked for behind those of that call."""


class Tap(Resumable, Protocol):
    """Sees what the source's experts of each layer get."""

    wants_inputs: bool  # whether `inputs` is to be called

    def chosen(self, layer: int, window: int, ids: Tensor, weights: Tensor) -> None:
        """[M, K] each, before any expert runs; windows ascend."""

    def inputs(self, layer: int, expert: int, rows: Tensor, inner: Tensor, weights: Tensor) -> None:
        """Receive an expert's tokens: inputs of gate and up [n, H], of down [n, I], and the weights
        [n] of its outputs. Not called for experts without tokens."""

    def layer_done(self, layer: int) -> None:
        """All of a layer's experts have run; what is written now survives a kill."""


@runtime_checkable
class SeesNorms(Protocol):
    """A `Tap` that wants to know how large the outputs of experts are."""

    def norms(self, layer: int, expert: int, norms: Tensor, weights: Tensor) -> None:
        """Receive the 2-norms [n] of an expert's outputs times their weights, and the weights [n].
        Not called for experts without tokens."""


def joined_state(parts: Sequence[Resumable]) -> dict[str, Array]:
    """The states of all parts, by names that begin with their place."""
    return {
        f"{place}.{name}": array
        for place, part in enumerate(parts)
        for name, array in part.state().items()
    }


def restore_joined(parts: Sequence[Resumable], state: Mapping[str, Array]) -> None:
    """Give each part what is its own of a `joined_state`."""
    for place, part in enumerate(parts):
        start = f"{place}."
        own = {name: array for name, array in state.items() if name.startswith(start)}
        part.restore({name.removeprefix(start): array for name, array in own.items()})


class Watcher(Resumable, Protocol):
    """Sees what the layers, and at last the head, return for each window."""

    def layer(self, index: int, window: int, values: Sequence[Any]) -> None:
        """Receive the values that a layer returns, by side; where sides do not differ yet, twice
        the same object."""
        return

    def logits(self, window: int, logits: Sequence[Tensor]) -> None:
        """[1, T, V], by side."""
