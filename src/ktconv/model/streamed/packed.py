"""The experts of both sides: the source's, and the packed ones that ktconv quantize-cpu wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from ktconv.errors import UsageError
from ktconv.model.forms import packed_class
from ktconv.model.matching import (
    check_layers,
    check_likeness,
    check_match,
    open_layers,
    trial_token,
)
from ktconv.model.module import PackedExperts
from ktconv.model.streamed.calls import Call, ExpertLayer
from ktconv.model.streamed.experts import SourceExperts
from ktconv.model.streamed.one_expert import OneExpert
from ktconv.source import MoELayer
from ktconv.source.settings import ModelSettings
from ktconv.system.arrays import Array
from ktconv.system.pool import Pool

# Of one call of the kernels: more tokens need more memory, and are not faster.
TOKENS_AT_ONCE = 8192


class BothExperts:
    """An ExpertRunner: calls of side 0 go to `source`, those of side 1 to the packed experts in
    `output`. Experts that `output` leaves out run on the source's weights on both sides, from the
    same read.

    `layers` are those of the model, by index, `settings` its config.json. Raises as
    `replace_experts` where they do not match. A layer whose packed experts answer unlike the
    source's raises UnlikeExperts when it runs. Packed weights are mapped, and released layer by
    layer. As a context manager it ends its threads.
    """

    def __init__(
        self,
        source: SourceExperts,
        output: Path,
        layers: Mapping[int, ExpertLayer],
        settings: ModelSettings,
        threads: int | None = None,
    ) -> None:
        if not output.is_dir():
            raise UsageError(f"{output} is not a directory")
        check_layers(settings, layers, output)
        self._experts = open_layers(output, layers, settings)
        for index, layer in layers.items():
            check_match(settings, index, layer.own, self._experts[index], output)
        self._source, self._output = source, output
        self._pool = Pool(threads)

    def run(self, layer: ExpertLayer, calls: Sequence[Call], outputs: Sequence[Tensor]) -> None:
        """Run both sides' experts, as ExpertRunner says."""
        experts = self._experts[layer.index]
        packed = packed_class(layer.own)(experts, self._pool, layer.own).eval()
        here = torch.from_numpy(experts.origins >= 0)
        trial = _Trial(layer, packed, here, self._output)
        of_source = [
            replace(call, ids=_only(call.ids, ~here)) if call.side else call for call in calls
        ]
        self._source.run(layer, of_source, outputs, trial.seen)
        for block in _blocks(calls, outputs, here):
            rows = torch.cat([part.call.rows[part.token] for part in block])
            ids = torch.cat([_only(part.call.ids[part.token], here) for part in block])
            weights = torch.cat([part.call.weights[part.token] for part in block])
            y = packed.summed(rows, ids, weights)
            sizes = [len(part.token) for part in block]
            for part, own in zip(block, torch.split(y, sizes), strict=True):
                part.output.index_add_(0, part.token, own.to(part.output.dtype))
        experts.release()

    def ahead(self, layer: MoELayer) -> None:
        """The source's are read ahead; those of the output are mapped."""
        self._source.ahead(layer)

    def state(self) -> Mapping[str, Array]:
        """State of `source`."""
        return self._source.state()

    def restore(self, state: Mapping[str, Array]) -> None:
        self._source.restore(state)

    def close(self) -> None:
        """End the threads of the kernels."""
        self._pool.close()

    def __enter__(self) -> BothExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Trial:
    """Compares the first expert that the source decodes, and the output has."""

    def __init__(
        self, layer: ExpertLayer, packed: PackedExperts, here: Tensor, output: Path
    ) -> None:
        self._layer, self._packed, self._here, self._output = layer, packed, here, output
        self._done = False

    def seen(self, expert: int, one: OneExpert) -> None:
        if self._done or not self._here[expert]:
            return
        self._done = True
        token, weight = trial_token(self._layer.own.hidden, one.down.dtype), torch.ones(1)
        theirs = one(token, weight.to(token.dtype))
        ours = self._packed.summed(token, torch.tensor([[expert]]), weight[:, None])
        check_likeness(theirs, ours, self._layer.index, self._output)


class _Part(NamedTuple):
    """Tokens of a call, which chose packed experts."""

    call: Call
    output: Tensor
    token: Tensor


def _blocks(
    calls: Sequence[Call], outputs: Sequence[Tensor], here: Tensor
) -> Iterator[list[_Part]]:
    """All tokens of side 1 that chose one of `here`, a bounded number at a time."""
    block: list[_Part] = []
    free = TOKENS_AT_ONCE
    for call, output in zip(calls, outputs, strict=True):
        if call.side != 1:
            continue
        token = torch.nonzero((_only(call.ids, here) >= 0).any(dim=1)).flatten()
        while len(token):
            block.append(_Part(call, output, token[:free]))
            token, free = token[free:], free - len(block[-1].token)
            if not free:
                yield block
                block, free = [], TOKENS_AT_ONCE
    if block:
        yield block


def _only(ids: Tensor, some: Tensor) -> Tensor:
    """Ids with -1 in place of experts that are not among `some`."""
    return torch.where((ids >= 0) & some[ids], ids, -1)
