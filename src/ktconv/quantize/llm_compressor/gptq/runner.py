"""GPTQ of the experts of a streamed model, layer by layer as `ktconv.model.streamed` asks.

Every expert of a layer computes every token, its weights are rounded so that its outputs for them
change least, and each token goes on with what the rounded weights of its own experts answer. A
finished layer is handed over at once, so that an interrupted run loses only the layer under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from msgspec import Struct

from ktconv.quantize.llm_compressor.library import quiet  # before what it silences

# isort: split
import torch
from torch import Tensor

from ktconv.errors import CheckpointError, ResourceError
from ktconv.model.load import first_line, out_of_memory
from ktconv.model.streamed.calls import Call, ExpertLayer
from ktconv.model.streamed.experts import LayerWork
from ktconv.model.streamed.filling import ExpertFiller
from ktconv.model.streamed.one_expert import OneExpert
from ktconv.quantize.llm_compressor.gptq.coverage import Counter, LayerCoverage
from ktconv.quantize.llm_compressor.gptq.rounding import Hessian, Rounded, Rounding
from ktconv.quantize.llm_compressor.gptq.selftest import LayerTest, SelfTest
from ktconv.source import Checkpoint, MoELayer, Projection
from ktconv.source.reading.reader import SourceReader
from ktconv.system.arrays import Array

BF16, F32 = 2, 4
ROUNDING_BYTES = 1 << 30  # on the CPU, for the experts that are rounded at once
# From 16 Hessians on, llm-compressor sums up the mean of their diagonals in another order. With
# fewer, the result is that of one at a time, whatever memory allows.
MOST_AT_ONCE = 15
OF_LIBRARIES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class QuantizedMatrix(Struct, frozen=True):
    """One projection of one expert in packed form (`rounding.Rounded`), and as the source has
    it."""

    expert: int
    projection: Projection
    tensors: Mapping[str, Tensor]
    source: Tensor  # [rows, cols]


# Expert -> packed form of its matrices.
FinishedLayer = Callable[[int], Mapping[Projection, Mapping[str, Tensor]]]


class Events(Protocol):
    """Observer of layers that are quantized."""

    def finished_layer(self, layer: int) -> FinishedLayer | None:
        """The chosen experts of a layer that an earlier run has quantized."""

    def layer_started(self, layer: int) -> None: ...

    def progressed(self, layer: int, share: float) -> None:
        """Another `share` of the work on a layer, which sums up to 1, is done."""

    def layer_done(
        self,
        layer: int,
        matrices: Iterator[QuantizedMatrix],
        coverage: Callable[[], LayerCoverage],
    ) -> None:
        """Take all chosen experts of a layer, which are quantized meanwhile; after them
        `coverage` is known. Later layers are calibrated on exactly these weights."""


def experts_at_once(
    hidden: int, intermediate: int, gated: bool, budget: int = ROUNDING_BYTES
) -> int:
    """Number of experts that are rounded together: a column of many costs little more than one."""
    fixed, each = _rounding_bytes(hidden, intermediate, gated)
    return max(1, min(MOST_AT_ONCE, (budget - fixed) // each))


def runner_memory(layers: Iterable[MoELayer], longest: int) -> int:
    """Bytes that calibrating the experts of these layers takes, with samples of up to `longest`
    tokens."""
    most = 0
    for layer in layers:
        hidden, inner, gated = layer.hidden_size, layer.intermediate_size, layer.gated
        fixed, each = _rounding_bytes(hidden, inner, gated)
        experts = min(len(layer.experts), experts_at_once(hidden, inner, gated))
        # A sample's inputs in float32, twice, and what an expert makes of them.
        tokens = longest * (2 * F32 * max(hidden, inner) + BF16 * (2 * hidden + 5 * inner))
        most = max(most, fixed + experts * each + tokens)
    return most


def _rounding_bytes(hidden: int, intermediate: int, gated: bool) -> tuple[int, int]:
    """Bytes of a layer, and of each expert that is rounded with others: matrices, and in float32
    the Hessians as sums, means and ordered, and weights with what a block changes in them."""
    size, first = hidden * intermediate, 2 if gated else 1
    rounding = F32 * max(5 * first * size, 4 * intermediate**2 + 5 * size)
    return F32 * 5 * hidden**2, rounding + F32 * intermediate**2 + BF16 * (first + 1) * size


class GptqRunner:
    """An ExpertRunner that quantizes the experts `chosen` (layer -> ids) of a checkpoint.

    All other experts, and those of layers that `events` knows to be finished, are computed as they
    are. Matrices are decoded to `dtype`, bfloat16 or float16, and computed on `device`. `tested`
    gets what the self-test of the first layer finds; None: no such test. The result depends on the
    arguments, the machine's kernels and the number of threads, not on chance.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: Mapping[int, Sequence[int]],
        rounding: Rounding,
        events: Events,
        dtype: torch.dtype,
        device: str = "cpu",
        tested: Callable[[SelfTest], None] | None = None,
    ) -> None:
        reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._filler = ExpertFiller(reader, dtype)
        self._dtype, self._device = dtype, device
        self._chosen = {layer: frozenset(ids) for layer, ids in chosen.items() if ids}
        self._rounding, self._events, self._tested = rounding, events, tested
        self._passed: list[int] = []

    def ahead(self, layer: MoELayer) -> None:
        """Rounding a layer takes longer than reading the next."""

    def run(self, layer: ExpertLayer, calls: Sequence[Call], outputs: Sequence[Tensor]) -> None:
        """Raises as ExpertRunner says; VerificationError where the self-test fails."""
        index = layer.index
        chosen = self._chosen.get(index, frozenset())
        finished = self._events.finished_layer(index) if chosen else None
        with quiet(), _errors_translated():
            work = _Layer(self, layer, calls, outputs)
            if not chosen or finished is not None:
                work.answer(chosen, finished)
            else:
                self._events.layer_started(index)
                self._events.layer_done(index, work.quantized(chosen), work.coverage)
        if chosen:
            self._passed.append(index)

    def state(self) -> Mapping[str, Array]:
        return {"passed": np.array(self._passed, np.int64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Raises NotFinished for a state behind a layer that is not finished: its file is gone."""
        self._passed = [int(index) for index in state["passed"]]
        for index in self._passed:
            if self._events.finished_layer(index) is None:
                raise NotFinished(index)


class NotFinished(Exception):
    """The samples have passed a layer whose weights are not there."""


class _Layer:
    """One layer's experts on their way through a runner."""

    def __init__(
        self,
        owner: GptqRunner,
        layer: ExpertLayer,
        calls: Sequence[Call],
        outputs: Sequence[Tensor],
    ) -> None:
        self._owner, self._layer, self._calls = owner, layer, calls
        self._work = LayerWork(layer, calls, outputs, owner._dtype, owner._device)
        own = layer.own
        self._counter, self._fell_back = Counter(own.count), list[str]()
        for call in calls:
            self._counter.add(call.ids.numpy())
        size = experts_at_once(own.hidden, own.intermediate, own.gated)
        with torch.device(owner._device):
            self._experts = [OneExpert(own, owner._dtype) for _ in range(min(size, own.count))]

    def coverage(self) -> LayerCoverage:
        return self._counter.result(self._fell_back)

    def answer(self, chosen: frozenset[int], finished: FinishedLayer | None) -> None:
        """Every token gets the sum of its experts; of `chosen`, the weights are those of
        `finished`."""
        for expert in self._routed():
            one = self._experts[0]
            if finished is not None and expert in chosen:
                for projection, tensors in finished(expert).items():
                    one.matrices[projection].copy_(self._owner._rounding.values(tensors))
            else:
                self._fill(expert, one)
            self._work.run(one, self._work.shares(expert))
        self._work.finish()

    def quantized(self, chosen: frozenset[int]) -> Iterator[QuantizedMatrix]:
        """Round the experts `chosen`; every token gets the sum of its experts meanwhile."""
        owner, own = self._owner, self._layer.own
        inputs = Hessian(own.hidden, owner._device)
        for call in self._calls:
            inputs.add(call.rows.to(owner._device))
        tested, owner._tested = owner._tested, None
        test = LayerTest(self._layer, self._calls, owner._dtype, owner._device) if tested else None
        needed = sorted(chosen.union(self._routed()))
        for first in range(0, len(needed), len(self._experts)):
            batch = dict(zip(needed[first:], self._experts, strict=False))
            for expert, one in batch.items():
                self._fill(expert, one)
            rounded = self._rounded({e: one for e, one in batch.items() if e in chosen}, inputs)
            for expert, one in batch.items():
                for projection, matrix in rounded.get(expert, {}).items():
                    if matrix.fell_back:
                        self._fell_back.append(f"{expert}.{projection}")
                    tensors = {name: part.cpu() for name, part in matrix.tensors.items()}
                    yield QuantizedMatrix(expert, projection, tensors, one.matrices[projection])
                if test is not None and expert in rounded:
                    self._try_nearest(test, expert, one, rounded[expert])
                self._replace(one, rounded.get(expert, {}))
                if test is not None and expert in rounded:
                    test.gptq.add(expert, one)
                self._work.run(one, self._work.shares(expert))
            owner._events.progressed(self._layer.index, len(batch) / len(needed))
        self._work.finish()
        if test is not None and tested:
            tested(test.result(self._layer.index, len(chosen)))

    # ---- one expert after the other ----

    def _routed(self) -> list[int]:
        """Experts with tokens."""
        return [int(expert) for expert in np.flatnonzero(self._counter.routed)]

    def _fill(self, expert: int, one: OneExpert) -> None:
        self._owner._filler.fill(self._layer.source.experts[expert], one)

    def _rounded(
        self, experts: Mapping[int, OneExpert], inputs: Hessian
    ) -> dict[int, dict[Projection, Rounded]]:
        """Expert -> its rounded matrices; `inputs` are of gate and up."""
        if not experts:
            return {}
        owner, rounding = self._owner, self._owner._rounding
        inner = self._layer.own.intermediate
        hessians = {expert: Hessian(inner, owner._device) for expert in experts}
        for call in self._calls:
            rows = call.rows.to(owner._device)
            for expert, one in experts.items():
                hessians[expert].add(_down_inputs(one, rows))
        firsts = [name for name in self._layer.source.projections if name != "down"]
        names = [(expert, name) for expert in experts for name in firsts]
        found = rounding.alike([experts[e].matrices[name] for e, name in names], inputs)
        downs = rounding.each(
            [one.matrices["down"] for one in experts.values()], [*hessians.values()]
        )
        by_name = dict(zip(names, found, strict=True))
        return {
            expert: {name: by_name[expert, name] for name in firsts} | {"down": down}
            for expert, down in zip(experts, downs, strict=True)
        }

    def _replace(self, one: OneExpert, matrices: Mapping[Projection, Rounded]) -> None:
        for projection, matrix in matrices.items():
            one.matrices[projection].copy_(self._owner._rounding.values(matrix.tensors))

    def _try_nearest(
        self, test: LayerTest, expert: int, one: OneExpert, rounded: Mapping[Projection, Rounded]
    ) -> None:
        """The answers of the source, and of the matrices rounded to nearest, which stay there."""
        test.source.add(expert, one)
        for projection, matrix in rounded.items():
            view = one.matrices[projection]
            view.copy_(self._owner._rounding.nearest(view, matrix.tensors))
        test.nearest.add(expert, one)


def _down_inputs(one: OneExpert, rows: Tensor) -> Tensor:
    """[M, I]: what the down projection of an expert gets for rows [M, H]."""
    found: Tensor | None = one.seen(rows, rows.new_ones(len(rows))).inner
    assert found is not None, "every expert has a down projection"
    return found


@contextmanager
def _errors_translated() -> Iterator[None]:
    """Errors of llm-compressor as KtconvErrors."""
    try:
        yield
    except (MemoryError, *OF_LIBRARIES) as error:
        if out_of_memory(error):
            raise ResourceError(
                "out of memory while calibrating",
                "use fewer --samples or a smaller --max-seq-len; layers that are done are kept",
            ) from error
        raise CheckpointError(
            f"llm-compressor cannot calibrate this model: {first_line(error)}",
            "--algorithm rtn works on the checkpoint itself; layers that are done are kept",
        ) from error
