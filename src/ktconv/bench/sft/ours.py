"""Our layer as a runner: the module that users train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from torch import Tensor

from ktconv import native
from ktconv.bench.limits import settle
from ktconv.bench.sft.steps import Times, turn
from ktconv.train.step import Step


class OurRunner:
    """Takes turns at one instruction set level."""

    def __init__(self, step: Step, isa: str, ids: Sequence[Tensor]) -> None:
        self._step, self._isa, self._ids = step, isa, cycle(ids)

    def turn(self, steps: int) -> Times:
        native.use_isa(self._isa)
        times = turn(self._step, self._ids, steps)
        settle()
        return times
