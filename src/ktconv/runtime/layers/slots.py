"""Experts by the slots of a layer: physical-to-logical maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktconv.errors import UsageError
from ktconv.system.arrays import Array

Slots = Sequence[int] | Array


def slot_origins(slots: Slots | None, experts: int) -> list[int]:
    """The expert of each slot: `slots` [P], where slot p has expert slots[p] of 0..experts-1, in
    any order, any number of times; None: a slot for each expert, in order.

    Ids of a forward are numbers of slots. UsageError for a map that is empty, has other
    dimensions, or names an expert that does not exist.
    """
    if slots is None:
        return list(range(experts))
    found = np.asarray(slots)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise UsageError(
            f"a map of slots must be a list of expert numbers, one for each slot, not "
            f"{found.dtype.name} {list(found.shape)}",
            "give integers, at least one",
        )
    wrong = np.flatnonzero((found < 0) | (found >= experts))
    if len(wrong):
        slot = int(wrong[0])
        raise UsageError(
            f"slot {slot} is to have expert {int(found[slot])}, but the layer has experts 0 to "
            f"{experts - 1}",
            "correct the map of slots",
        )
    return [int(expert) for expert in found]
