"""Choice of the most used experts, for a GPU that cannot hold all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ktconv.errors import UsageError
from ktconv.system.arrays import F64, Bools
from ktconv.system.numbers import reals, whole


def hot_experts(
    frequency: ArrayLike,
    budget: int,
    per_layer: bool = False,
    experts: Sequence[int] | None = None,
) -> Bools:
    """bool [L, E] of `frequency` [L, E]: True for the `budget` most used experts of all layers, or
    of each layer.

    `frequency`: how often each was chosen, not negative, in any unit that is the same for all.
    `experts`: the number of each layer, where layers have less than E. A budget is cut to what
    there is. Of equally used experts the lower layer and id come first. UsageError for anything
    else.
    """
    used = reals("frequency", frequency)
    if used.ndim != 2 or not used.size:
        raise UsageError(f"frequencies have the shape {list(used.shape)}, not [layers, experts]")
    there = _there(used, experts)
    if not (np.isfinite(used) & (used >= 0))[there].all():
        raise UsageError("a frequency is negative or not finite")
    keys = np.where(there, -used, np.inf)
    rows = keys if per_layer else keys.reshape(1, -1)
    order = np.argsort(rows, axis=1, kind="stable")[:, : whole("budget", budget)]
    mask = np.zeros(rows.shape, np.bool_)
    np.put_along_axis(mask, order, True, axis=1)
    return mask.reshape(used.shape) & there


def padded(rows: Sequence[ArrayLike]) -> F64:
    """float64 [L, E] of numbers by layer, with zeros behind those of layers with fewer than E."""
    arrays = [np.asarray(row, np.float64) for row in rows]
    table = np.zeros((len(arrays), max(map(len, arrays), default=0)))
    for line, row in zip(table, arrays, strict=True):
        line[: len(row)] = row
    return table


def _there(used: F64, experts: Sequence[int] | None) -> Bools:
    """Columns of each layer that are experts."""
    layers, most = used.shape
    counts = np.full(layers, most) if experts is None else np.asarray(experts)
    if counts.shape != (layers,) or counts.max() > most or counts.min() < 0:
        raise UsageError(f"numbers of experts do not fit frequencies of shape {list(used.shape)}")
    return np.arange(most) < counts[:, None]
