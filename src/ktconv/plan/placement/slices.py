"""Slices of an expert's tensor for one of several GPUs, and their places (tensor parallel).

Engines keep gate (w1) and up (w3) as the rows of one parameter, w13: those of gate, then those
of up; without a gate it has the rows of up alone, which is then called w1. down is w2. Each GPU has
an equal part of the intermediate size: rows of w1 and w3, columns of w2. The rules are those of
vLLM's FusedMoE.

    part = tp_slice((768, 2048), "w3", tp=2, rank=1)
    parameter = np.empty(part.shape)                        # [768, 2048]: 384 rows of each
    parameter[part.destination] = tensor[part.source]       # rows 384 to 767, to the lower half
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.plan.placement.parallel import MOST, Grain, why_not_cut
from ktconv.system.numbers import whole

Shard = Literal["w1", "w2", "w3"]
# weight: codes or weights; group, block: scales or zero points along inputs too; channel: one per
# output; tensor: one in all, scales of inputs too; g_idx: the group of each input.
Kind = Literal["weight", "group", "block", "channel", "tensor", "g_idx"]
Index: TypeAlias = "tuple[slice | int, ...]"


class TensorSlice(Struct, frozen=True):
    """`parameter[destination] = tensor[source]`, for NumPy arrays and torch tensors."""

    source: Index
    destination: Index
    shape: tuple[int, ...]  # of the GPU's whole parameter of one expert (of all, if stacked)

    def as_dict(self) -> dict[str, Any]:
        """The slice for JSON: an index is a number, or [start, stop]."""
        return {
            "source": [_listed(index) for index in self.source],
            "destination": [_listed(index) for index in self.destination],
            "shape": list(self.shape),
        }


def tp_slice(
    shape: Sequence[int],
    shard: Shard,
    tp: int,
    rank: int,
    kind: Kind = "weight",
    *,
    per: int = 1,
    intermediate: int | None = None,
    gated: bool = True,
    transposed: bool = False,
    stacked: bool = False,
    act_order: bool = False,
) -> TensorSlice:
    """The slice of a tensor of `shape` that GPU `rank` of `tp` takes, and its place in the
    parameter.

    A matrix is [out, in], or [in, out] if `transposed`; with `stacked` all experts' are one tensor,
    whose first dimension they are. An entry of the dimension that is cut stands for `per` numbers
    of the intermediate size: 1 for weights, 8 for int32 words of 4 bits along that dimension, the
    group or block size for scales. `intermediate`: needed where the last entry stands for less.

    weight, group, block: rows of w1 and w3, columns of w2. With `act_order` (groups in any order,
    g_idx) the group scales of w2 are whole. channel: rows of w1 and w3; w2 is whole, as its outputs
    are not cut. g_idx: cut for w2, whole for w1 and w3. tensor, and tensors without dimensions:
    never cut; w13 has one number for w1 and, where there is a gate, one for w3.

    UsageError where the intermediate size does not divide, or an entry would be cut.
    """
    _check_names(shard, kind, tp, rank, gated)
    place = 1 if shard == "w3" else 0
    halves = 1 if shard == "w2" or not gated else 2
    if kind == "tensor" or len(shape) == stacked:
        return _scalar(tuple(shape), shard, halves, place, stacked)
    dimension = _cut_dimension(shape, shard, kind, transposed, stacked, act_order)
    whole = tuple(slice(0, size) for size in shape)
    if dimension is None:
        halves = 1 if kind == "g_idx" else halves
        return TensorSlice(whole, whole, tuple(shape))
    part = _entries(shape[dimension], tp, per, intermediate)
    source, destination, sizes = list(whole), list(whole), list(shape)
    source[dimension] = slice(rank * part, (rank + 1) * part)
    destination[dimension] = slice(place * part, (place + 1) * part)
    sizes[dimension] = halves * part
    return TensorSlice(tuple(source), tuple(destination), tuple(sizes))


def _cut_dimension(
    shape: Sequence[int], shard: Shard, kind: Kind, transposed: bool, stacked: bool, act_order: bool
) -> int | None:
    """None: the tensor is not cut."""
    least, most = {"g_idx": (1, 1), "channel": (1, 2)}.get(kind, (2, 2))
    dimensions = len(shape) - stacked
    if not least <= dimensions <= most:
        raise UsageError(
            f"a tensor of shape {list(shape)} cannot be {kind} of {shard}: it should have "
            f"{most + stacked} dimensions"
        )
    down = shard == "w2"
    if kind == "g_idx":
        return int(stacked) if down else None
    if kind == "channel":
        return None if down else int(stacked) + (dimensions == 2 and transposed)
    if down and act_order and kind in ("group", "block"):
        return None
    return int(stacked) + (down != transposed)


def _entries(count: int, tp: int, per: int, intermediate: int | None) -> int:
    """Entries of each GPU, of `count` in all."""
    size = count * per if intermediate is None else intermediate
    if -(-size // whole("per", per, 1)) != count:
        raise UsageError(f"{count} entries are not those of an intermediate size {size} by {per}")
    what = f"the {per} that an entry stands for"
    if reason := why_not_cut(size, tp, [Grain(per, what)]):
        raise UsageError(f"a tensor cannot be cut for {tp} GPUs: {reason}")
    return -(-count // tp)


def _scalar(
    shape: tuple[int, ...], shard: Shard, halves: int, place: int, stacked: bool
) -> TensorSlice:
    """One number, [] or [1], of each expert."""
    outer, inner = shape[:stacked], shape[stacked:]
    if prod(inner) != 1:
        raise UsageError(f"a tensor of shape {list(shape)} is not one number of {shard}")
    experts: Index = tuple(slice(0, size) for size in outer)
    source = (*experts, *(0 for _ in inner))
    if shard == "w2":
        return TensorSlice(source, experts, outer)
    return TensorSlice(source, (*experts, place), (*outer, halves))


def _check_names(shard: str, kind: str, tp: int, rank: int, gated: bool) -> None:
    for value, known in ((shard, get_args(Shard)), (kind, get_args(Kind))):
        if value not in known:
            raise UsageError(f"{value!r} is unknown", f"known: {', '.join(known)}")
    if shard == "w3" and not gated:
        raise UsageError("experts without a gate have no w3", "their up projection is w1")
    if not 0 <= whole("rank", rank) < whole("tp", tp, 1, MOST):
        raise UsageError(f"rank {rank} is not one of {tp} GPUs", f"ranks are 0 to {tp - 1}")


def _listed(index: slice | int) -> Any:
    return [index.start, index.stop] if isinstance(index, slice) else index
