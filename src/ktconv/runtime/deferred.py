"""Experts that a token may get one layer later, without losing any.

What a layer defers is computed while the caller goes on, for example with the next layer's
attention on a GPU, and is added to the sum of the next layer. Which experts of a token are deferred
depends on that token alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ktconv.errors import UsageError
from ktconv.runtime.arrays import kind_of
from ktconv.runtime.handle import Handle
from ktconv.runtime.layer import MoELayer


def split_deferred(ids: Any, weights: Any, keep: int) -> tuple[Any, Any]:
    """`now` and `later`, both [..., K] like ids: each token's `keep` experts of largest weight, and
    the others; -1 where an expert is in the other one.

    Of equal weights the first is kept; ids below 0 count as the smallest. UsageError for shapes
    that differ, or a `keep` below 0.
    """
    if type(keep) is not int or keep < 0:
        raise UsageError(f"keep must be a number of experts per token, not {keep!r}")
    kind = kind_of("ids", ids)
    chosen, order = kind.numpy(ids), kind_of("weights", weights).numpy(weights)
    if chosen.shape != order.shape or not chosen.ndim:
        raise UsageError(
            f"ids {list(chosen.shape)} and weights {list(order.shape)} must have one shape [..., K]"
        )
    order = np.where(chosen < 0, -np.inf, order)
    first = np.argsort(-order, axis=-1, kind="stable")[..., :keep]
    kept = np.zeros(chosen.shape, bool)
    np.put_along_axis(kept, first, True, axis=-1)
    now, later = (np.where(these, chosen, -1).astype(chosen.dtype) for these in (kept, ~kept))
    return kind.of_numpy(now), kind.of_numpy(later)


class DeferredExperts:
    """The deferred sum on its way from layer to layer, of one forward pass.

        with DeferredExperts(keep=4) as deferred:
            for n, layer in enumerate(layers):
                x = ...                                     # attention, router
                y = deferred(layer, x, ids, weights, last=n == len(layers) - 1)

    The result of layer n has what layer n - 1 deferred; the last one defers nothing, so that the
    sum over all layers is complete. Not for several threads at once.
    """

    def __init__(self, keep: int) -> None:
        """`keep`: experts per token that are computed at once."""
        if type(keep) is not int or keep < 0:
            raise UsageError(f"keep must be a number of experts per token, not {keep!r}")
        self.keep = keep
        self._pending: Handle | None = None

    def __call__(
        self,
        layer: MoELayer,
        x: Any,
        ids: Any,
        weights: Any,
        *,
        skip: Any = None,
        out: Any = None,
        last: bool = False,
    ) -> Any:
        """As `layer(x, ids, weights, skip=skip, out=out)`, less what is deferred and plus what the
        call before deferred. x, ids and weights may change once it returns.

        UsageError where the tokens are not as many as in the call before: nothing is lost, and
        `flush()` returns its sum.
        """
        carried = self._pending.wait() if self._pending else None
        if carried is not None and tuple(carried.shape) != tuple(x.shape):
            raise UsageError(
                f"x is {list(x.shape)}, but the deferred sum of the layer before is "
                f"{list(carried.shape)}",
                "add flush() to the result of the layer before",
            )
        now, later = (ids, None) if last else split_deferred(ids, weights, self.keep)
        kept = (x, weights) if last else (_copied(x), _copied(weights))  # out may be x
        found = layer(x, now, weights, skip=skip, add_to=carried, out=out)
        self._pending = None
        if not last:
            x, weights = kept
            self._pending = layer.submit(x, later, weights, skip=skip, out=_sum_of(x))
        return found

    def flush(self) -> Any:
        """The sum that no layer has added yet, fp32 [..., H]; None if there is none."""
        if self._pending is None:
            return None
        found = self._pending.wait()
        self._pending = None
        return found

    def __enter__(self) -> DeferredExperts:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """UsageError if a deferred sum was left over."""
        if kind is None and self._pending is not None:
            self._pending = None
            raise UsageError(
                "the experts that the last layer deferred were not added",
                "call it with last=True for the last layer, or add flush() to the result",
            )


def _copied(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def _sum_of(x: Any) -> Any:
    return kind_of("x", x).empty(tuple(x.shape), "fp32")
