"""Copies of busy experts, and which GPU holds each: expert-parallel load balancing (EPLB).

The algorithm is that of DeepSeek's expert-parallel load balancer, which vLLM and SGLang use: groups
of experts are packed onto nodes, the busiest experts of a node are copied, and the copies are
packed onto its GPUs. Every choice here is stable: of equal loads the lower index comes first.

A *physical* expert is a place on a GPU, a *logical* one an expert of the model. Places are counted
through all GPUs: GPU g has physical experts g * P / G to (g + 1) * P / G - 1.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike

from ktconv.errors import UsageError
from ktconv.plan.placement.parallel import MOST
from ktconv.system.arrays import F64, I64
from ktconv.system.numbers import reals, whole
from ktconv.system.units import counted


class Replicas(Struct, frozen=True):
    """Experts by place, and places by expert; without the dimension L for the load of a single
    layer."""

    physical_to_logical: I64  # [L, P]
    logical_to_physical: I64  # [L, E, C]: places of an expert, ascending, then -1; C: most copies
    copies: I64  # [L, E], at least 1

    def gpu_loads(self, load: ArrayLike, gpus: int) -> F64:
        """float64 [L, gpus] from `load` [L, E]: copies take equal parts of their expert's load."""
        each = self.place_loads(load)
        loads: F64 = each.reshape(*each.shape[:-1], gpus, -1).sum(-1)
        return loads

    def place_loads(self, load: ArrayLike) -> F64:
        """float64 [L, P] from `load` [L, E]: what each place takes."""
        share = checked_load(load) / self.copies
        return np.take_along_axis(share, self.physical_to_logical, axis=-1)


def balance(
    load: ArrayLike, physical: int, groups: int = 1, nodes: int = 1, gpus: int = 1
) -> Replicas:
    """Place experts with this load on `physical` places on `gpus` GPUs of `nodes` nodes.

    `load` is [E], or [L, E] for many layers in one call: tokens of each logical expert, not
    negative. Where the number of `groups` of experts (those of the router's group-limited choice,
    E / groups neighbours each) divides by `nodes`, each node gets whole groups, so that a token's
    groups are on few nodes; else copies are placed without regard to groups and nodes.

    E <= physical, which must divide by `gpus`, and `gpus` by `nodes`; UsageError names what does
    not. Time is O(P (G + E)) per layer, in P steps over all layers at once.
    """
    loads = checked_load(load)
    experts = loads.shape[-1]
    for name, number in (("groups", groups), ("nodes", nodes), ("gpus", gpus)):
        whole(name, number, 1, MOST)
    if groups % nodes or nodes == 1:
        groups = nodes = 1
    _check_sizes(experts, physical, groups, nodes, gpus)
    flat = loads.reshape(-1, experts)
    layers = len(flat)
    # 1. groups onto nodes: [layers, nodes, experts of a node]
    size = experts // groups
    held = _in_places(flat.reshape(layers, groups, size).sum(-1), nodes)
    ids = (held[:, :, None] * size + np.arange(size)).reshape(layers, nodes, -1)
    ids = np.sort(ids, axis=2)  # so that equal experts go by index
    # 2. copies within a node
    of_node = np.take_along_axis(flat[:, None, :], ids, axis=2)
    members, copies = replicate(of_node, physical // nodes)
    each = np.take_along_axis(of_node / copies, members, axis=2)
    # 3. copies onto the GPUs of the node
    members = np.take_along_axis(members, _in_places(each, gpus // nodes), axis=2)
    slots = np.take_along_axis(ids, members, axis=2).reshape(layers, physical)
    return replicas_of(slots.reshape(*loads.shape[:-1], physical), experts)


def replicate(load: ArrayLike, physical: int) -> tuple[I64, I64]:
    """The expert of each of `physical` places [..., physical], and copies of each [..., E].

    The first E places have experts 0 to E - 1; each further one has another copy of the expert
    whose copies take most, load / copies (of equal ones the lowest).
    """
    loads = checked_load(load)
    *outer, experts = loads.shape
    if whole("physical", physical, 1, MOST) < experts:
        raise UsageError(f"{physical} places are less than {counted(experts, 'expert')}")
    flat = loads.reshape(-1, experts)
    rows = np.arange(len(flat))
    slots = np.tile(np.arange(experts), (len(flat), 1))
    copies = np.ones(flat.shape, np.int64)
    more = np.empty((len(flat), physical - experts), np.int64)
    for step in range(physical - experts):
        more[:, step] = busiest = np.argmax(flat / copies, axis=1)
        copies[rows, busiest] += 1
    slots = np.concatenate([slots, more], axis=1)
    return slots.reshape(*outer, physical), copies.reshape(loads.shape)


def pack(loads: ArrayLike, bins: int) -> tuple[I64, I64]:
    """The bin and the place in it of each item, both [..., n] as `loads`; each bin gets n / bins.

    Items go, heaviest first, into the lightest bin that is not full: of equal items the first, of
    equal bins the lowest. One item per bin: item i is in bin i. UsageError where bins do not
    divide n.
    """
    found = checked_load(loads)
    count = found.shape[-1]
    if count % whole("bins", bins, 1):
        raise UsageError(f"{count} items cannot be packed evenly into {bins} bins")
    flat, size = found.reshape(-1, count), count // bins
    if size == 1:
        chosen = np.tile(np.arange(count), (len(flat), 1))
        return chosen.reshape(found.shape), np.zeros(found.shape, np.int64)
    rows = np.arange(len(flat))
    order = np.argsort(-flat, axis=1, kind="stable")
    total, filled = np.zeros((len(flat), bins)), np.zeros((len(flat), bins), np.int64)
    chosen, place = np.empty(flat.shape, np.int64), np.empty(flat.shape, np.int64)
    for item in order.T:
        lightest = np.argmin(np.where(filled < size, total, np.inf), axis=1)
        chosen[rows, item], place[rows, item] = lightest, filled[rows, lightest]
        total[rows, lightest] += flat[rows, item]
        filled[rows, lightest] += 1
    return chosen.reshape(found.shape), place.reshape(found.shape)


def initial_map(experts: int, redundant: int) -> I64:
    """int64 [experts + redundant], physical to logical before any load is known: all experts, then
    expert i % experts at place i."""
    count = whole("experts", experts, 1, MOST)
    return np.arange(count + whole("redundant", redundant, 0, MOST)) % count


def replicas_of(physical_to_logical: ArrayLike, experts: int) -> Replicas:
    """All tables of int [P] or [L, P], whose every expert 0 to `experts` - 1 has a place."""
    slots = _integers(physical_to_logical)
    if not slots.ndim or not slots.size or whole("experts", experts, 1, MOST) > slots.shape[-1]:
        raise UsageError(f"places {list(slots.shape)} cannot hold {counted(experts, 'expert')}")
    flat = slots.reshape(-1, slots.shape[-1])
    if not 0 <= flat.min() <= flat.max() < experts:
        raise UsageError(f"a place holds an expert that is not one of 0 to {experts - 1}")
    copies = np.stack([np.bincount(one, minlength=experts) for one in flat])
    if not copies.all():
        raise UsageError(f"expert {np.argwhere(copies == 0)[0, 1]} has no place")
    places = np.full((len(flat), experts, copies.max()), -1, np.int64)
    rows = np.arange(len(flat))[:, None]
    order = np.argsort(flat, axis=1, kind="stable")  # by expert, then by place
    ids = np.take_along_axis(flat, order, axis=1)
    first = np.cumsum(copies, axis=1) - copies
    places[rows, ids, np.arange(flat.shape[1]) - np.take_along_axis(first, ids, axis=1)] = order
    outer = slots.shape[:-1]
    return Replicas(slots, places.reshape(*outer, experts, -1), copies.reshape(*outer, experts))


def replica_slots(logical_to_physical: ArrayLike, ids: ArrayLike) -> I64:
    """int64 like `ids`: the place that computes each choice; -1 for ids that are no expert.

    `logical_to_physical` is [E, C], padded with -1. Choice i, counted through all tokens, goes to
    copy i % copies of its expert, as in vLLM.
    """
    table, chosen = _integers(logical_to_physical), _integers(ids)
    if table.ndim != 2:
        raise UsageError(f"a table of places is [experts, copies], not {list(table.shape)}")
    valid = (chosen >= 0) & (chosen < len(table))
    expert = np.where(valid, chosen, 0)
    position = np.arange(chosen.size).reshape(chosen.shape)
    copies = np.maximum((table >= 0).sum(axis=1), 1)
    return np.where(valid, table[expert, position % copies[expert]], -1)


def evenness(loads: ArrayLike) -> F64:
    """float64 [...] of `loads` [..., G]: mean over maximum, 1 if all GPUs have the same load (or
    none). A step takes as long as the busiest GPU, so this is the share of time that GPUs work."""
    found = checked_load(loads)
    most, mean = found.max(-1), found.mean(-1)
    even: F64 = np.divide(mean, most, out=np.ones_like(mean), where=most > 0)
    return even


def checked_load(load: ArrayLike) -> F64:
    """Load as float64; UsageError for an empty one, and for values that are negative or not
    finite."""
    found = reals("a load", load)
    if not found.ndim or not found.size:
        raise UsageError(f"a load of shape {list(found.shape)} has no experts")
    if not (np.isfinite(found) & (found >= 0)).all():
        raise UsageError("a load has a value that is negative or not finite")
    return found


def _integers(values: ArrayLike) -> I64:
    """Values as int64; UsageError for numbers of another kind."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise UsageError(f"places and ids must be integers, not {found.dtype.name}")
    return found.astype(np.int64, copy=False)


def _in_places(loads: F64, bins: int) -> I64:
    """Items in the order of bins and of places in them, for `loads` [..., n]."""
    chosen, place = pack(loads, bins)
    return np.argsort(chosen * (loads.shape[-1] // bins) + place, axis=-1)


def _check_sizes(experts: int, physical: int, groups: int, nodes: int, gpus: int) -> None:
    if gpus % nodes:
        raise UsageError(f"{gpus} GPUs cannot be shared out evenly by {nodes} nodes")
    if whole("physical", physical, 1, MOST) < experts:
        raise UsageError(f"{physical} places are less than {counted(experts, 'expert')}")
    if physical % gpus:
        raise UsageError(
            f"{physical} places ({counted(experts, 'expert')} and "
            f"{counted(physical - experts, 'copy')}) cannot be "
            f"shared out evenly by {gpus} GPUs",
            "numbers of copies that can be: {}, {} ...".format(*even_copies(experts, gpus)),
        )
    if experts % groups:
        raise UsageError(f"{counted(experts, 'expert', 'do')} not divide into {groups} groups")


def even_copies(experts: int, gpus: int) -> list[int]:
    """The smallest numbers of copies with which all GPUs have the same number of places."""
    least = -experts % gpus
    return [least, least + gpus]
