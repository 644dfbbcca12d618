"""Self-test: whether GPTQ serves the first layer at least as well as rounding to nearest.

The layer's experts answer the tokens of a few samples as the source has them, rounded by GPTQ, and
rounded to nearest with the same scales. Better to fail after one layer than after hours of work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from ktconv.errors import VerificationError
from ktconv.model.streamed.calls import Call, ExpertLayer
from ktconv.model.streamed.experts import LayerWork
from ktconv.model.streamed.one_expert import OneExpert

SAMPLES, TOKENS = 2, 512
# GPTQ calibrates every expert on every token, but only routed tokens are compared: with very few of
# them a layer can be slightly worse than rounding to nearest.
TOLERANCE = 1.05


class SelfTest(Struct, frozen=True):
    """Relative RMS errors of a layer's outputs: with GPTQ, and rounded to nearest."""

    layer: int
    experts: int
    gptq_error: float
    rtn_error: float

    def words(self) -> str:
        """Result in a line."""
        return (
            f"self-test: the experts of layer {self.layer} are {self.gptq_error:.4f} off with "
            f"GPTQ, {self.rtn_error:.4f} rounded to nearest"
        )

    def check(self) -> None:
        """VerificationError if GPTQ is worse than rounding to nearest, or no number."""
        if not self.gptq_error <= TOLERANCE * self.rtn_error:
            raise VerificationError(
                f"the self-test failed: experts of layer {self.layer} are {self.gptq_error:.4f} "
                f"off with GPTQ and {self.rtn_error:.4f} rounded to nearest",
                "try another --dataset, more --dampening or --algorithm rtn; --no-self-test "
                "skips this test",
            )


class Answers:
    """The sums of what a layer's experts answer calls."""

    def __init__(
        self, layer: ExpertLayer, calls: Sequence[Call], dtype: torch.dtype, device: str
    ) -> None:
        self._outputs = [torch.zeros_like(call.rows) for call in calls]
        self._work = LayerWork(layer, calls, self._outputs, dtype, device)

    def add(self, expert: int, one: OneExpert) -> None:
        """The next expert, with the matrices that it has now."""
        self._work.run(one, self._work.shares(expert))

    def finished(self) -> list[Tensor]:
        """Sums in float32."""
        self._work.finish()
        return [output.float() for output in self._outputs]


class LayerTest:
    """Answers of a layer's experts to the first tokens of a few samples: as the source has them,
    with GPTQ, and rounded to nearest."""

    def __init__(
        self, layer: ExpertLayer, calls: Sequence[Call], dtype: torch.dtype, device: str
    ) -> None:
        few = [_first_tokens(call) for call in calls[:SAMPLES]]
        self.source, self.gptq, self.nearest = (
            Answers(layer, few, dtype, device) for _ in range(3)
        )

    def result(self, layer: int, experts: int) -> SelfTest:
        """Once all experts have answered."""
        source = self.source.finished()
        gptq, nearest = (_relative(source, one.finished()) for one in (self.gptq, self.nearest))
        return SelfTest(layer, experts, gptq, nearest)


def _first_tokens(call: Call) -> Call:
    """First tokens of those that chose an expert: Llama 4 has a row per token and expert."""
    chosen = (call.ids >= 0).any(dim=1).nonzero().flatten()[:TOKENS]
    return replace(call, rows=call.rows[chosen], ids=call.ids[chosen], weights=call.weights[chosen])


def _relative(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    error = sum(float((a - b).square().sum()) for a, b in zip(wanted, found, strict=True))
    size = sum(float(a.square().sum()) for a in wanted)
    return (error / size) ** 0.5 if size else float("nan")
