"""How the experts of a layer are distributed over GPUs, and which numbers of GPUs are possible.

Tensor parallelism gives each GPU a part of the intermediate size, which must begin and end with a
group of scales and an int32 word. Expert parallelism gives each GPU whole experts: neighbours
(linear) or every n-th (round robin).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ktconv.system.units import format_ranges

PLACEMENTS = ("linear", "round_robin")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes that the distribution of a layer depends on."""

    experts: Sequence[int]  # ids
    intermediate: int
    bits: int  # per weight
    group_size: int | None  # None: one scale per row


@dataclass(frozen=True, slots=True)
class Split:
    """Whether a number of GPUs is possible."""

    reason: str | None  # why not; None: it is
    first_layer: Mapping[str, Sequence[int]] | None = None  # placement -> experts of each GPU

    @property
    def possible(self) -> bool:
        return self.reason is None


def tensor_parallel(shapes: Sequence[LayerShape], size: int) -> Split:
    """Whether `size` GPUs can each take a part of the intermediate size; why not."""
    reasons = dict.fromkeys(filter(None, (_why_not_cut(shape, size) for shape in shapes)))
    return Split("; ".join(reasons) or None)


def _why_not_cut(shape: LayerShape, size: int) -> str | None:
    inner, group = shape.intermediate, shape.group_size
    if inner % size:
        return f"intermediate size {inner} is not divisible by {size}"
    part = inner // size
    if group is not None and part % group:
        return (
            f"each GPU would have {part} of the {inner} columns of down (w2), which is not "
            f"divisible by the group size {group}"
        )
    if part * shape.bits % 32:
        return f"{part} columns of down (w2) of {shape.bits} bits do not fill int32 words"
    return None


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
                reasons[f"{len(shape.experts)} experts give GPUs {counts} each"] = None
    return Split("; ".join(reasons) or None, shares)


def placed(experts: Sequence[int], size: int, placement: str) -> list[list[int]]:
    """Expert ids by GPU. Experts count by their position among those that are there; where they
    cannot be shared out evenly, the first GPUs have one more."""
    if placement == "round_robin":
        return [list(experts[rank::size]) for rank in range(size)]
    share, more = divmod(len(experts), size)
    ends = [rank * share + min(rank, more) for rank in range(size + 1)]
    return [list(experts[start:end]) for start, end in pairwise(ends)]
