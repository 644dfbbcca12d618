"""The source's experts: each is decoded once, and runs on its tokens of all windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from ktconv.families.family import Projection
from ktconv.model.streamed.ahead import ADVISED_BYTES, Advice, Ahead, advise_layer
from ktconv.model.streamed.calls import (
    Call,
    ExpertLayer,
    SeesNorms,
    Tap,
    joined_state,
    restore_joined,
)
from ktconv.model.streamed.filling import ExpertFiller, filling_memory
from ktconv.model.streamed.one_expert import OneExpert
from ktconv.source import Checkpoint, MoELayer
from ktconv.source.reading.matrices import source_bytes
from ktconv.source.reading.reader import SourceReader
from ktconv.system.arrays import F32, Array

# Rows of an expert at once: as many as make a matrix product fast. More only take memory.
ROWS_AT_ONCE = 1024


# What side 1 has in place of the matrices of (layer, expert): float32 [out, in]; None: the same.
Converted = Callable[[int, int], Mapping[Projection, F32] | None]


def expert_memory(layer: MoELayer, dtype: torch.dtype) -> int:
    """Bytes of one decoded expert, and of the buffers that it is decoded with."""
    return filling_memory(layer.experts[0].values(), dtype)


class SourceExperts:
    """An ExpertRunner for the experts of a checkpoint, in `dtype`: bfloat16, float16 or float32.

    Each expert that a call chose is read and decoded once per layer, by `threads` threads ahead of
    the one that runs, as far as `memory` bytes of decoded experts allow; two at least. `read` is
    told bytes of the source when they have been read. `taps` see the calls of side 0.

    `converted(layer, expert)` are the matrices [out, in] that side 1 has in place of an expert's;
    None for those that it shares with the source, as it does with all without `converted`. Threads
    call it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        threads: int = 1,
        memory: int | None = None,
        taps: Sequence[Tap] = (),
        read: Callable[[int], None] = lambda _: None,
        converted: Converted | None = None,
    ) -> None:
        self._reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._dtype, self._threads, self._memory = dtype, threads, memory
        self._taps, self._read, self._converted = taps, read, converted
        self._next: MoELayer | None = None

    def ahead(self, layer: MoELayer) -> None:
        """Ask the system to read the first experts of the layer that is run after the next one,
        as soon as all of that one are read."""
        self._next = layer

    def run(
        self,
        layer: ExpertLayer,
        calls: Sequence[Call],
        outputs: Sequence[Tensor],
        seen: Callable[[int, OneExpert], None] = lambda *_: None,
    ) -> None:
        """Run the experts, as ExpertRunner says, with the sums of the model's own module, bit by
        bit. `seen` gets each of the source's experts, with its number, before it runs."""
        for call in calls:
            if call.side == 0:
                for tap in self._taps:
                    tap.chosen(layer.index, call.window, call.ids, call.weights)
        work = LayerWork(layer, calls, outputs, self._dtype)
        chosen, following, self._next = work.chosen, self._next, None
        advice = Advice(layer.source.experts[expert].values() for expert in chosen)
        slots = [self._slot(layer) for _ in range(self._depth(layer.source))]

        def fill(slot: _Slot, number: int) -> None:
            advice.upto(number, ADVISED_BYTES)
            with torch.inference_mode():  # as the pass has it, but per thread
                self._fill(slot, work, chosen[number])

        def rest() -> None:
            if following is not None:
                advise_layer(following)

        with Ahead(slots, fill).filled(len(chosen), self._threads, rest) as filled:
            for slot in filled:
                self._read(slot.nbytes)
                if slot.nbytes:
                    seen(slot.expert, slot.source)
                self._run_expert(work, slot)
        work.finish()
        for tap in self._taps:
            tap.layer_done(layer.index)

    # ---- decoding, by threads ----

    def _slot(self, layer: ExpertLayer) -> _Slot:
        one = OneExpert(layer.own, self._dtype)
        other = None if self._converted is None else OneExpert(layer.own, self._dtype)
        return _Slot(ExpertFiller(self._reader, self._dtype), one, other)

    def _depth(self, layer: MoELayer) -> int:
        """Number of experts in memory."""
        if self._memory is None:
            return self._threads + 1
        each = expert_memory(layer, self._dtype) * (1 if self._converted is None else 2)
        return max(1, min(self._threads + 1, self._memory // each))

    def _fill(self, slot: _Slot, work: LayerWork, expert: int) -> None:
        matrices = work.layer.source.experts[expert]
        slot.expert, slot.nbytes, slot.apart = expert, 0, False
        if slot.converted is not None and self._converted is not None and work.has(expert, 1):
            found = self._converted(work.layer.index, expert)
            if found is not None:
                slot.apart = True
                slot.filler.put(matrices, found, slot.converted)
        if work.has(expert, 0) or not slot.apart:
            slot.filler.fill(matrices, slot.source)
            slot.nbytes = sum(map(source_bytes, matrices.values()))

    # ---- running ----

    def _run_expert(self, work: LayerWork, slot: _Slot) -> None:
        taps = [tap for tap in self._taps if tap.wants_inputs]
        measuring = [tap for tap in self._taps if isinstance(tap, SeesNorms)]
        shares = work.shares(slot.expert)
        split = sum(work.calls[share.call].side == 0 for share in shares)
        other = slot.source
        if slot.apart and slot.converted is not None:
            other = slot.converted
        if not taps and not measuring and other is slot.source:
            split = len(shares)
        kept: list[tuple[Tensor, Tensor, Tensor]] | None = [] if taps else None
        measured: list[tuple[Tensor, Tensor]] | None = [] if measuring else None
        work.run(slot.source, shares[:split], kept, measured)
        work.run(other, shares[split:])
        if kept:
            rows, inner, weights = map(torch.cat, zip(*kept, strict=True))
            for tap in taps:
                tap.inputs(work.layer.index, slot.expert, rows, inner, weights)
        if measured:
            norms, weights = map(torch.cat, zip(*measured, strict=True))
            for one in measuring:
                one.norms(work.layer.index, slot.expert, norms, weights)

    def state(self) -> dict[str, Array]:
        """State of the taps."""
        return joined_state(self._taps)

    def restore(self, state: Mapping[str, Array]) -> None:
        restore_joined(self._taps, state)


class _Slot(Struct):
    """Memory for one expert, and which it is. `apart`: side 1 has `converted`."""

    filler: ExpertFiller
    source: OneExpert
    converted: OneExpert | None
    expert: int = -1
    nbytes: int = 0  # that were read of the source
    apart: bool = False


class Share(Struct, frozen=True):
    """Tokens of a call that chose an expert, and which of their choices it was."""

    call: int
    token: Tensor
    slot: Tensor


class LayerWork:
    """Work of a layer's experts for calls, and the sums of their answers, as the model's own module
    adds them up: experts ascend. They run on `device`."""

    def __init__(
        self,
        layer: ExpertLayer,
        calls: Sequence[Call],
        outputs: Sequence[Tensor],
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self._dtype, self._device = dtype, device
        self.layer, self.calls = layer, sorted(calls, key=lambda call: call.side)
        order = sorted(range(len(calls)), key=lambda place: calls[place].side)
        of_weights = calls[0].weights.dtype if calls else dtype
        # Whether sums are rounded at the end.
        with torch.device(device):
            self.wide = OneExpert(layer.own, dtype).sum_dtype(of_weights) != dtype
        kind = _Slots if layer.own.call == "logits" else _Added
        self.sums = [kind(outputs[place], calls[place].ids) for place in order]
        self._sorted = [_by_expert(call.ids, layer.own.count) for call in self.calls]

    @property
    def chosen(self) -> list[int]:
        """Experts that at least one token chose, ascending."""
        count = self.layer.own.count
        return [e for e in range(count) if any(self.has(e, side) for side in (0, 1))]

    def has(self, expert: int, side: int) -> bool:
        """Whether a token of this side chose it."""
        known = zip(self.calls, self._sorted, strict=True)
        return any(
            starts[expert] < starts[expert + 1] for call, (_, starts) in known if call.side == side
        )

    def shares(self, expert: int) -> list[Share]:
        """Shares of an expert, the source's side first."""
        found = []
        for number, (order, starts) in enumerate(self._sorted):
            place = order[starts[expert] : starts[expert + 1]]
            if len(place):
                tokens = len(self.calls[number].ids)
                found.append(Share(number, place % tokens, place // tokens))
        return found

    def run(
        self,
        one: OneExpert,
        shares: Sequence[Share],
        kept: list[tuple[Tensor, Tensor, Tensor]] | None = None,
        measured: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Add an expert's outputs for these tokens. `kept`: takes the inputs of gate and up, of
        down, and the weights of tokens; `measured`: the 2-norms of weighted outputs, and the
        weights."""
        # 16-bit products have the same bits whatever rows are beside a row. In float32 they do
        # not (libraries take other ways for a few rows), so windows stay apart there, unless
        # rows are only measured.
        apart = self._dtype == torch.float32 and measured is None
        for group in [[share] for share in shares] if apart else [shares]:
            for block in [group] if apart else _blocks(group):
                calls = [self.calls[part.call] for part in block]
                parts = list(zip(calls, block, strict=True))
                rows = _gathered(parts)
                weights = torch.cat([call.weights[part.token, part.slot] for call, part in parts])
                rows, weights = rows.to(self._device), weights.to(self._device)
                if kept is None and measured is None and not self.wide:
                    y = one(rows, weights)
                else:
                    seen = one.seen(rows, weights)
                    assert seen.added is not None
                    y = seen.added
                    if kept is not None:
                        assert seen.inner is not None
                        kept.append((rows, seen.inner, weights))
                    if measured is not None:
                        norms = torch.linalg.vector_norm(y.reshape(rows.shape).float(), dim=1)
                        measured.append((norms.cpu(), weights.cpu()))
                sizes = [len(part.token) for part in block]
                for part, own in zip(block, torch.split(y.to("cpu"), sizes), strict=True):
                    self.sums[part.call].add(part.token, part.slot, own)

    def finish(self) -> None:
        """The sums are in the outputs."""
        for one in self.sums:
            one.finish()


def _by_expert(ids: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """Places in the transposed ids [K, M], as the model's own modules order an expert's tokens,
    by expert; and where those of each begin, and all end."""
    flat = ids.T.reshape(-1)
    starts = torch.bincount(flat + 1, minlength=count + 1).cumsum(0).tolist()
    return flat.argsort(stable=True), starts


def _gathered(parts: Sequence[tuple[Call, Share]]) -> Tensor:
    """The rows of all tokens, one below the other."""
    first = parts[0][0].rows
    found = first.new_empty((sum(len(part.token) for _, part in parts), first.shape[1]))
    start = 0
    for call, part in parts:
        stop = start + len(part.token)
        torch.index_select(call.rows, 0, part.token, out=found[start:stop])
        start = stop
    return found


def _blocks(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """Blocks of the same tokens, each of bounded size."""
    block: list[Share] = []
    free = ROWS_AT_ONCE
    for share in shares:
        token, slot = share.token, share.slot
        while len(token):
            block.append(Share(share.call, token[:free], slot[:free]))
            token, slot, free = token[free:], slot[free:], free - len(block[-1].token)
            if not free:
                yield block
                block, free = [], ROWS_AT_ONCE
    if block:
        yield block


# ---- sums over experts -----------------------------------------------------------------


class _Added:
    """The sum over the experts of each token: expert by expert, in the dtype of their outputs."""

    def __init__(self, output: Tensor, ids: Tensor) -> None:
        self._output = self._sum = output

    def add(self, token: Tensor, slot: Tensor, y: Tensor) -> None:
        """An expert's output for some tokens, times their weights."""
        if self._sum.dtype != y.dtype:
            self._sum = torch.zeros_like(self._output, dtype=y.dtype)
        self._sum.index_add_(0, token, y)

    def finish(self) -> None:
        """The sum is in `output`."""
        if self._sum is not self._output:
            self._output += self._sum.to(self._output.dtype)


class _Slots(_Added):
    """Sums as Aria makes them, which adds up all of a token's outputs at once, and rounds once."""

    def __init__(self, output: Tensor, ids: Tensor) -> None:
        super().__init__(output, ids)
        self._each = output.new_zeros((*ids.shape, output.shape[1]))

    def add(self, token: Tensor, slot: Tensor, y: Tensor) -> None:
        self._each[token, slot] = y.to(self._each.dtype)

    def finish(self) -> None:
        self._output += self._each.sum(dim=1)
