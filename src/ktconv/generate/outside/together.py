"""Decoder layers one behind the other, whose token one call of the C library computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ktconv import native
from ktconv.generate.outside.cache import GrowingLayer, growing
from ktconv.generate.outside.linears import is_bf16
from ktconv.model.module import PackedExperts
from ktconv.runtime import workspace
from ktconv.system.pool import Pool


class Member(Struct, frozen=True):
    """A decoder layer of these: its module and what that has as its forward, its number in caches,
    its kernels and the module of its experts."""

    module: Any
    forward: Any
    number: int
    attention: native.AttentionLayer
    routed: native.RoutedLayer
    experts: PackedExperts

    @property
    def is_bare(self) -> bool:
        """Whether a call of the module is one of these kernels, and nothing more."""
        one = self.module
        hooks = one._forward_pre_hooks or one._forward_hooks
        return not hooks and one.forward is self.forward and not self.experts.is_adapted


class Visit(Struct):
    """A pass over layers; `ended` when those still to come need no call."""

    ended: bool = False


class Visited(nn.ModuleList):
    """A model's layers, of which `together` has the last: a pass over them ends early where a layer
    has answered for all behind it."""

    def __init__(self, layers: nn.ModuleList, together: Together) -> None:
        super().__init__(layers)
        self.training, self._together = layers.training, together

    def __iter__(self) -> Iterator[nn.Module]:
        layers, together = list(super().__iter__()), self._together
        visit = together.visit = Visit() if together.are_last(layers) else None
        try:
            for layer in layers:
                yield layer
                if visit is not None and visit.ended:
                    return
        finally:
            if together.visit is visit:
                together.visit = None

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        whole = index.indices(len(self)) == (0, len(self), 1)
        return self if whole else nn.ModuleList(list(self._modules.values())[index])


class _Run(Struct, frozen=True):
    """Layers from place `first` on that one call computes, with keys and values of a cache."""

    first: int
    cache: Any
    kept: Sequence[GrowingLayer]
    memory: Sequence[Any]  # of each of these,
    places: Sequence[tuple[int, int]]  # and where that is
    room: int  # tokens that all have room for

    def goes_on(self, place: int, cache: Any, kept: GrowingLayer) -> bool:
        """Whether the next token can be computed, as far as its first layer shows."""
        same = place == self.first and cache is self.cache and kept.memory is self.memory[0]
        return same and kept.count < self.room

    def is_kept(self, place: int, number: int, cache: Any, tokens: int) -> bool:
        """Whether a cache has these `tokens` of a layer in the same memory."""
        index = place - self.first
        kept = self.kept[index]
        same = cache is self.cache and cache.layers[number] is kept
        return same and kept.memory is self.memory[index] and kept.count == tokens


class Together(threading.local):
    """Layers by their places, from 0 on. The one that gets a token first computes it in those
    behind it as well, assuming that each gets the output of the one before, and the same rotation
    and cache. One that is called otherwise computes itself, and is not computed ahead again. Once
    all have been called so with a cache, a pass over them, with it, calls the first alone, which
    then gives the output of the last. Threads know nothing of each other's tokens: each has
    attributes of its own."""

    def __init__(self, members: Sequence[Member], pool: Pool, watch: Any) -> None:
        self._members, self._pool, self._watch = members, pool, watch
        self._modules = [one.module for one in members]
        self._kernels = native.DecoderLayers([(one.attention, one.routed) for one in members])
        self._apart = set[int]()  # places that are not computed ahead
        self._run: _Run | None = None
        self._seen: _Run | None = None  # one whose layers were all called as was assumed
        self.visit: Visit | None = None  # that goes on
        self._scratch_size = 0  # for it
        self._next = 0  # the place whose output is there and not handed over; 0: none
        self._tokens = 0  # that were there before
        self._rotation: Any = None
        self._outputs: Sequence[Tensor] = ()  # of the run's layers,
        self._at = 0  # one behind the other, from this address on
        self._row = row = 2 * members[0].experts.experts.hidden  # bytes
        # Copies of outputs, which may change, by place; and two arrays that are used between.
        self._rows = native.aligned_bytes(row * (len(members) + 2))
        at = native.address_of(self._rows)
        self._places = [at + number * row for number in range(len(members) + 2)]
        self._copies = [native.bytes_at(one, row) for one in self._places]

    def handed(self, place: int, x: Tensor, mask: Any, cache: Any, rotation: Any) -> Tensor | None:
        """The output of a layer that was computed ahead, from just this."""
        run, ahead = self._run, self._next
        self._next = 0
        if place != ahead or not ahead or run is None:
            return None
        member = self._members[place]
        if member.experts.is_adapted or not run.is_kept(place, member.number, cache, self._tokens):
            self._run = None
            return None
        if (
            mask is None
            and (rotation is self._rotation or _are_same(rotation, self._rotation))
            and not torch.is_grad_enabled()
            and self._is_output(x, place - 1, run.first)
        ):
            return self._hand(run, place)
        self._apart.add(place)
        self._run = None
        return None

    def computed(
        self,
        place: int,
        x: Tensor,
        kept: GrowingLayer,
        cache: Any,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The output of a layer for x [1, 1, hidden]; its keys and values, with room, are `kept`
        of the cache."""
        run = self._run
        if run is None or not run.goes_on(place, cache, kept):
            run = self._run = self._planned(place, kept, cache)
        visit, tokens = self.visit, kept.count
        if visit is not None and run is self._seen and self._skips(run, tokens):
            y = self._compute(run, x, tokens, rotation)[-1]
            for one in run.kept:
                one.count = tokens + 1
            visit.ended, self.visit = True, None
            return y
        self._outputs = self._compute(run, x, tokens, rotation).unbind(0)
        size = len(run.kept) * self._row
        copies = native.bytes_at(self._places[place], size)
        copies[:] = native.bytes_at(self._at, size)
        self._tokens, self._rotation = tokens, rotation
        return self._hand(run, place)

    def are_last(self, layers: list[nn.Module]) -> bool:
        """Whether these layers end with all of those here."""
        return layers[-len(self._modules) :] == self._modules

    def _skips(self, run: _Run, tokens: int) -> bool:
        """Whether nothing is needed of the layers of a run but the last one's output."""
        heard = _has_any_global_hook()  # type: ignore[no-untyped-call]
        return not heard and all(
            member.is_bare and run.is_kept(place, member.number, run.cache, tokens)
            for place, member in enumerate(self._members[run.first :], run.first)
        )

    def _compute(
        self, run: _Run, x: Tensor, tokens: int, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Outputs [layers, 1, 1, hidden] of a run."""
        rows = x.new_empty((len(run.kept), *x.shape))
        self._at, cosine, sine = rows.data_ptr(), rotation[0].data_ptr(), rotation[1].data_ptr()
        given = x.data_ptr(), cosine, sine
        sizes = tokens, run.room, *self._places[-2:]
        steps = [native.decoder_step(*given, *one, *sizes) for one in run.places]
        memory = workspace.take(self._pool, self._scratch_size)
        try:
            seconds = self._kernels.run(self._pool, run.first, steps, self._at, memory)
        finally:
            workspace.give(self._pool, memory)
        if self._watch is not None:
            self._watch(seconds)
        return rows

    def _is_output(self, x: Tensor, place: int, first: int) -> bool:
        """Whether x is what a layer gave, as it was then."""
        at, output = self._at + (place - first) * self._row, self._outputs[place - first]
        if x is not output:
            if x.shape != output.shape or not is_bf16(x):
                return False
            at = x.data_ptr()
        return bool(native.bytes_at(at, self._row) == self._copies[place])

    def _hand(self, run: _Run, place: int) -> Tensor:
        index = place - run.first
        run.kept[index].count += 1
        self._next = place + 1 if index + 1 < len(run.kept) else 0
        if place + 1 == len(self._members):
            self._seen = run
        return self._outputs[index]

    def _planned(self, place: int, first: GrowingLayer, cache: Any) -> _Run:
        """A layer and those behind it that can be computed ahead of their calls."""
        found = [first]
        for other in range(place + 1, len(self._members)):
            member = self._members[other]
            kept = growing(cache, member.number)
            if kept is None or other in self._apart or not member.experts.is_plain:
                break
            if kept.room != first.room or kept.count != first.count:
                break
            found.append(kept)
        room = first.room
        size = self._kernels.scratch_size(place, len(found), room - 1, self._pool)
        self._scratch_size = size
        memory, places = [one.memory for one in found], [one.places for one in found]
        return _Run(place, cache, found, memory, places, room)


def _are_same(rotation: Any, other: tuple[Tensor, Tensor]) -> bool:
    if rotation is other:
        return True
    alike = type(rotation) is tuple and len(rotation) == 2
    return alike and rotation[0] is other[0] and rotation[1] is other[1]
