"""Distributions of a layer's experts over GPUs, and the numbers of GPUs that are possible.

Tensor parallelism gives each GPU a part of the intermediate size, which must begin and end with
whatever is stored as a whole: a group of scales, a word of several weights. Expert parallelism
gives each GPU whole experts: neighbours (linear) or every n-th (round robin).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.system.arrays import I32, I64
from ktconv.system.numbers import whole
from ktconv.system.units import counted, format_ranges

Placement = Literal["linear", "round_robin"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
MOST = 1 << 20  # experts of a layer, or GPUs


class Grain(Struct, frozen=True):
    """Unit that a cut through the intermediate size must not divide."""

    size: int  # of the intermediate size
    words: str  # "the group size 128"


class LayerShape(Struct, frozen=True):
    """The sizes that the distribution of a layer depends on."""

    experts: Sequence[int]  # ids
    intermediate: int
    grains: Sequence[Grain] = ()


class Split(Struct, frozen=True):
    """Whether a number of GPUs is possible."""

    reason: str | None  # why not; None: it is
    first_layer: Mapping[str, Sequence[int]] | None = None  # placement -> experts of each GPU

    @property
    def possible(self) -> bool:
        return self.reason is None


# ---- tensor parallel -------------------------------------------------------------------


def tensor_parallel(shapes: Sequence[LayerShape], size: int) -> Split:
    """Whether `size` GPUs can each take a part of the intermediate size; why not."""
    found = (why_not_cut(shape.intermediate, size, shape.grains) for shape in shapes)
    reasons = dict.fromkeys(filter(None, found))
    return Split("; ".join(reasons) or None)


def why_not_cut(intermediate: int, size: int, grains: Sequence[Grain] = ()) -> str | None:
    """Reason why the intermediate size cannot be cut into `size` equal parts; None if it can."""
    if intermediate % size:
        return f"intermediate size {intermediate} is not divisible by {size}"
    part = intermediate // size
    for grain in grains:
        if size > 1 and part % grain.size:
            return (
                f"each of {size} GPUs would have {part} of the intermediate size {intermediate}, "
                f"which is not divisible by {grain.words}"
            )
    return None


# ---- expert parallel -------------------------------------------------------------------


def expert_parallel(shapes: Sequence[LayerShape], size: int) -> Split:
    """Whether every layer's experts are shared out evenly in both placements; why not."""
    reasons: dict[str, None] = {}
    shares: dict[str, list[int]] = {}
    for shape in shapes:
        for placement in PLACEMENTS:
            ranks = placed(shape.experts, size, placement)
            shares.setdefault(placement, [len(rank) for rank in ranks])
            if len(set(map(len, ranks))) > 1:
                counts = format_ranges(sorted(set(map(len, ranks))))
                reasons[f"{counted(len(shape.experts), 'expert', 'give')} GPUs {counts} each"] = (
                    None
                )
    return Split("; ".join(reasons) or None, shares)


def placed(experts: Sequence[int], size: int, placement: Placement) -> list[list[int]]:
    """Expert ids by GPU. Experts count by their position among those that are there; where they
    cannot be shared out evenly, the first GPUs have one more."""
    if placement == "round_robin":
        return [list(experts[rank::size]) for rank in range(size)]
    share, more = divmod(len(experts), size)
    ends = [rank * share + min(rank, more) for rank in range(size + 1)]
    return [list(experts[start:end]) for start, end in pairwise(ends)]


def expert_map(experts: int, ep: int, rank: int, placement: Placement = "linear") -> I32:
    """int32 [experts]: the place of each expert on GPU `rank` of `ep`, -1 for those of others.

    GPU `rank` has experts // ep of them, and one more if rank < experts % ep: neighbours
    ("linear") or rank, rank + ep, ... ("round_robin"); with more GPUs than experts the last have
    none. As vLLM's FusedMoE places them; for ep = 1, where it has no map, the identity. Raises
    UsageError.
    """
    _check_parallel(experts, ep, placement)
    if not 0 <= whole("rank", rank) < ep:
        raise UsageError(f"rank {rank} is not one of {ep} GPUs", f"ranks are 0 to {ep - 1}")
    return local_places(placed(range(experts), ep, placement)[rank], experts)


def local_places(ids: Sequence[int], experts: int) -> I32:
    """int32 [experts]: position in `ids`, -1 for experts that are not there."""
    places = np.full(experts, -1, np.int32)
    places[list(ids)] = np.arange(len(ids), dtype=np.int32)
    return places


class RoundRobinTables(NamedTuple):
    """Places of a layer's experts, counted through all GPUs, where they are dealt in turn."""

    global_to_physical: I64  # [experts]: the place of each expert
    physical_to_global: I64  # [experts]: its inverse, the expert at each place
    local_to_global: Sequence[I64]  # by GPU: its experts, in their order there


def round_robin_tables(experts: int, ep: int) -> RoundRobinTables:
    """The tables of vLLM's round-robin placement.

    Expert g is number g // ep on GPU g % ep, whose places follow those of the GPUs before it:
    physical = owner * base + min(owner, rem) + local, with base, rem = divmod(experts, ep).
    Raises UsageError.
    """
    _check_parallel(experts, ep, "round_robin")
    local = [np.array(ids, np.int64) for ids in placed(range(experts), ep, "round_robin")]
    physical = np.concatenate(local)
    return RoundRobinTables(np.argsort(physical), physical, local)


def _check_parallel(experts: int, ep: int, placement: str) -> None:
    whole("experts", experts, 1, MOST)
    whole("ep", ep, 1, MOST)
    if placement not in PLACEMENTS:
        raise UsageError(f"placement {placement!r} is unknown", f"known: {', '.join(PLACEMENTS)}")
