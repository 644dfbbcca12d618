"""The source's experts: each is decoded once, and runs on its tokens of all windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ktconv.checkpoint import Checkpoint, MoELayer
from ktconv.model.streamed.calls import Call, ExpertLayer, Tap
from ktconv.model.streamed.filling import ExpertFiller
from ktconv.model.streamed.inputs import DownInputs
from ktconv.model.streamed.one_expert import OneExpert
from ktconv.reading.matrices import source_bytes
from ktconv.system.arrays import Array

# Rows of an expert at once: as many as make a matrix product fast. More only take memory.
_ROWS_AT_ONCE = 1024


class SourceExperts:
    """An ExpertRunner for the experts of a checkpoint, in `dtype`: bfloat16, float16 or float32.

    Each expert that a call chose is read and decoded once per layer. `read` is told bytes of the
    source when they have been read. `taps` see the calls of side 0.
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
        device: str = "cpu",
    ) -> None:
        self._filler = ExpertFiller(checkpoint, dtype)
        self._dtype, self._taps, self._read, self._device = dtype, taps, read, device

    def ahead(self, layer: MoELayer) -> None:
        """Ask the system to read the first experts of a layer that is computed next."""

    def run(self, layer: ExpertLayer, calls: Sequence[Call], outputs: Sequence[Tensor]) -> None:
        """As ExpertRunner says; with the sums of the model's own module, bit by bit."""
        for call in calls:
            if call.side == 0:
                for tap in self._taps:
                    tap.chosen(layer.index, call.window, call.ids, call.weights)
        work = _Work(layer, calls, outputs)
        one = OneExpert(layer.own, self._dtype)
        for expert in work.chosen:
            matrices = layer.source.experts[expert]
            self._filler.fill(matrices, one)
            self._read(sum(map(source_bytes, matrices.values())))
            self._run_expert(work, one, expert)
        work.finish()
        for tap in self._taps:
            tap.layer_done(layer.index)

    def _run_expert(self, work: _Work, one: OneExpert, expert: int) -> None:
        taps = [tap for tap in self._taps if tap.wants_inputs]
        seen = _Seen(one) if taps else None
        # 16-bit products have the same bits whatever rows are beside a row. In float32 they do
        # not (a library takes other ways for a few rows), so windows stay apart there.
        shares = work.shares(expert)
        apart = self._dtype == torch.float32
        for group in [[share] for share in shares] if apart else [shares]:
            for block in _blocks(group):
                rows = torch.cat([work.calls[part.call].rows[part.token] for part in block])
                weights = torch.cat(
                    [work.calls[part.call].weights[part.token, part.slot] for part in block]
                )
                if seen is None:
                    y = one(rows, weights)
                else:
                    tapped = sum(
                        len(part.token) for part in block if work.calls[part.call].side == 0
                    )
                    y = seen.run(rows, weights, tapped)
                for part, own in zip(
                    block, torch.split(y, [len(p.token) for p in block]), strict=True
                ):
                    work.sums[part.call].add(part.token, part.slot, own)
        if seen is not None and seen.rows:
            for tap in taps:
                tap.inputs(work.layer.index, expert, torch.cat(seen.rows), torch.cat(seen.inner))

    def state(self) -> dict[str, Array]:
        """Those of the taps."""
        return {
            f"{number}.{name}": array
            for number, tap in enumerate(self._taps)
            for name, array in tap.state().items()
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        for number, tap in enumerate(self._taps):
            start = f"{number}."
            tap.restore(
                {
                    name.removeprefix(start): array
                    for name, array in state.items()
                    if name.startswith(start)
                }
            )


@dataclass(frozen=True, slots=True)
class _Share:
    """Tokens of a call that chose an expert, and which of their choices it was."""

    call: int
    token: Tensor
    slot: Tensor


class _Work:
    """What the experts of a layer have to do."""

    def __init__(
        self, layer: ExpertLayer, calls: Sequence[Call], outputs: Sequence[Tensor]
    ) -> None:
        self.layer, self.calls = layer, sorted(calls, key=lambda call: call.side)
        order = sorted(range(len(calls)), key=lambda place: calls[place].side)
        kind: type[_Summed] = _Slots if layer.own.call == "logits" else _Added
        self.sums = [kind(outputs[place], calls[place].ids) for place in order]
        self._sorted = [_by_expert(call.ids, layer.own.count) for call in self.calls]

    @property
    def chosen(self) -> list[int]:
        """Experts that at least one token chose, ascending."""
        total = sum(counts for _, counts in self._sorted)
        return torch.nonzero(torch.as_tensor(total)).flatten().tolist()

    def shares(self, expert: int) -> list[_Share]:
        """Of the source's side first."""
        found = []
        for number, (order, counts) in enumerate(self._sorted):
            if not counts[expert]:
                continue
            first = int(counts[:expert].sum())
            place = order[first : first + int(counts[expert])]
            tokens = len(self.calls[number].ids)
            found.append(_Share(number, place % tokens, place // tokens))
        return found

    def finish(self) -> None:
        for one in self.sums:
            one.finish()


def _by_expert(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places in the transposed ids [K, M], as the model's own modules order an expert's tokens,
    by expert; and how many each has."""
    flat = ids.T.reshape(-1)
    counts = torch.bincount(flat + 1, minlength=count + 1)
    return flat.argsort(stable=True)[int(counts[0]) :], counts[1:]


def _blocks(shares: Sequence[_Share]) -> Iterator[list[_Share]]:
    """The same tokens, so many at a time."""
    block: list[_Share] = []
    free = _ROWS_AT_ONCE
    for share in shares:
        token, slot = share.token, share.slot
        while len(token):
            block.append(_Share(share.call, token[:free], slot[:free]))
            token, slot, free = token[free:], slot[free:], free - len(block[-1].token)
            if not free:
                yield block
                block, free = [], _ROWS_AT_ONCE
    if block:
        yield block


class _Seen:
    """An expert whose inputs are kept as it runs."""

    def __init__(self, one: OneExpert) -> None:
        self._one = one
        self.rows: list[Tensor] = []
        self.inner: list[Tensor] = []

    def run(self, rows: Tensor, weights: Tensor, tapped: int) -> Tensor:
        """The output; the inputs of so many rows are kept."""
        with DownInputs(self._one.down, self._one.intermediate) as mode:
            y = self._one(rows, weights)
        assert mode.found is not None, "an expert without a down projection"
        if tapped:
            self.rows.append(rows[:tapped])
            self.inner.append(mode.found[:tapped])
        return y


# ---- sums over experts -----------------------------------------------------------------


class _Summed(Protocol):
    """The sum over the experts of each token."""

    def __init__(self, output: Tensor, ids: Tensor) -> None: ...

    def add(self, token: Tensor, slot: Tensor, y: Tensor) -> None:
        """An expert's output for some tokens, times their weights."""

    def finish(self) -> None:
        """The sum is in `output`."""


class _Added:
    """Expert by expert."""

    def __init__(self, output: Tensor, ids: Tensor) -> None:
        self._output = output

    def add(self, token: Tensor, slot: Tensor, y: Tensor) -> None:
        self._output.index_add_(0, token, y.to(self._output.dtype))

    def finish(self) -> None:
        pass


class _Slots:
    """For Aria, which adds up all of a token's outputs at once, and rounds once."""

    def __init__(self, output: Tensor, ids: Tensor) -> None:
        self._output = output
        self._each = output.new_zeros((*ids.shape, output.shape[1]))

    def add(self, token: Tensor, slot: Tensor, y: Tensor) -> None:
        self._each[token, slot] = y.to(self._each.dtype)

    def finish(self) -> None:
        self._output += self._each.sum(dim=1)
