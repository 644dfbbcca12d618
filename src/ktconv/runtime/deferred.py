"""Experts that a token may get one layer later, without losing any.

What a layer defers is computed while the caller goes on, for example with the next layer's
attention on a GPU, and is added to the sum of the next layer. Which experts of a token are deferred
depends on that token alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ktconv.errors import UsageError
from ktconv.runtime.adapters import OWN
from ktconv.runtime.arrays import kind_of
from ktconv.runtime.compiled import uncompiled
from ktconv.runtime.handle import Handle
from ktconv.runtime.layer import MoELayer
from ktconv.runtime.queued import split_ids
from ktconv.system.arrays import Array
from ktconv.system.numbers import whole


@uncompiled
def split_deferred(ids: Any, weights: Any, keep: int) -> tuple[Any, Any]:
    """`now` and `later`, both [..., K] like ids (int64 for unsigned ones): each token's `keep`
    experts of largest weight, and the others; -1 where an expert is in the other one.

    Of equal weights the first is kept; ids below 0 count as the smallest. UsageError for shapes
    that differ, or a `keep` below 0.
    """
    count = whole("keep", keep)
    chosen, order = _values("ids", ids, "iu"), _values("weights", weights, "f")
    if chosen.shape != order.shape or not chosen.ndim:
        raise UsageError(
            f"ids {list(chosen.shape)} and weights {list(order.shape)} must have one shape [..., K]"
        )
    now, later = np.empty_like(chosen), np.empty_like(chosen)
    split_ids(chosen, order, count, now, later)
    of_numpy = kind_of("ids", ids).of_numpy
    return of_numpy(now), of_numpy(later)


def _values(name: str, array: Any, kinds: str) -> Array:
    """An array as NumPy has it. UsageError for other kinds of numbers; unsigned ones become
    signed."""
    try:
        found = kind_of(name, array).numpy(array)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(f"{name} cannot be read: {error}") from None
    if found.dtype.kind not in kinds:
        raise UsageError(f"{name} must not be {found.dtype.name}")
    return found.astype(np.int64) if found.dtype.kind == "u" else found


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
        self.keep = whole("keep", keep)
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
        adapter: str | None = OWN,
        adapter_ids: Any = None,
    ) -> Any:
        """Call the layer, as `layer(x, ids, weights, skip=skip, out=out)`, with adapters as there,
        less what is deferred and plus what the call before deferred. The arguments may change once
        it returns.

        UsageError where the tokens are not as many as in the call before: nothing is lost, and
        `flush()` returns its sum.
        """
        carried = self._pending.wait() if self._pending else None
        shape = tuple(getattr(x, "shape", ()))
        if carried is not None and tuple(carried.shape) != shape:
            raise UsageError(
                f"x is {list(shape)}, but the deferred sum of the layer before is "
                f"{list(carried.shape)}",
                "add flush() to the result of the layer before",
            )
        now, later = (ids, None) if last else split_deferred(ids, weights, self.keep)
        kept = None if last else (_copied(x), _copied(weights), _copied(skip))  # out may be x
        lora: Any = {"adapter": adapter, "adapter_ids": _copied(adapter_ids)}
        found = layer(x, now, weights, skip=skip, add_to=carried, out=out, **lora)
        self._pending = None
        if kept:
            x, weights, skip = kept
            self._pending = layer.submit(x, later, weights, skip=skip, out=_sum_of(x), **lora)
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
    """None, and what `layer` will refuse, as it is."""
    copy = getattr(array, "clone", None) or getattr(array, "copy", None)
    return copy() if copy else array


def _sum_of(x: Any) -> Any:
    return kind_of("x", x).empty(tuple(x.shape), "fp32")
