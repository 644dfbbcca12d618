"""Levels structure and weights of GGUF outputs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct, field

from ktconv import native
from ktconv.quantize.gguf.task import biases_of, compared, stack_buffers, stats_of
from ktconv.source import MoELayer, Projection, TensorRef
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import MatrixReader, spans_of
from ktconv.source.reading.reader import Span
from ktconv.system.units import counted
from ktconv.targets.packed.matrix_check import ErrorStats
from ktconv.verify.findings import Facts
from ktconv.verify.gguf.dequantized import GgufLayersCheck, GgufModelCheck
from ktconv.verify.gguf.output import GgufOutput, open_gguf_output
from ktconv.verify.reading import Context, CopyCheck, check_claims, read_into
from ktconv.verify.runner import Advance, Check, unit_of
from ktconv.verify.structure import StructureCheck
from ktconv.verify.totals import ItemResult, Totals
from ktconv.verify.verifier import OutputVerifier
from ktconv.writer.gguf_shards import TENSORS_COUNT


class GgufStructureCheck(StructureCheck):
    _output: GgufOutput

    def tensors(self) -> int:
        plan = self._output.plan
        if plan is None and self._output.manifest is None:
            return self._declared()  # names are known from a plan alone
        if plan is None:
            return self._check_names({*self._output.records})
        others = [name for name in self._output.records if name in self._output.others]
        return self._check_planned(plan.layers, others)

    def _declared(self) -> int:
        """Number of tensors in all parts of the model, by the parts that are there."""
        counts = (one.metadata.get(TENSORS_COUNT) for one in self._packed.headers.values())
        return max((one for one in counts if type(one) is int), default=0)


class StackErrors(Struct):
    """Errors of a tensor, whose experts are checked one by one: the manifest has those of all."""

    left: int  # experts; those that are wrong, or not in the sample, stay
    sums: ErrorStats = field(default_factory=ErrorStats)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, context: Context, name: str, sums: ErrorStats) -> None:
        """Adds an expert's errors; with the last ones, compares all with the manifest."""
        with self.lock:
            self.sums.add(sums)
            self.left -= 1
            complete = self.left == 0
        if complete:
            check_claims(context, name, self.sums)


class StackCheck(Struct, frozen=True):
    """A tensor of all experts of a layer, in the output, or a part of it."""

    context: Context
    tensor: TensorRef
    layer: MoELayer
    proj: Projection

    @property
    def unit(self) -> str:
        return unit_of(self.layer.index)


class BlocksCheck(StackCheck, frozen=True):
    """The blocks of a matrix against their source."""

    expert: int
    errors: StackErrors

    @property
    def nbytes(self) -> int:
        matrix = self.layer.experts[self.expert][self.proj]
        return matrix.nbytes(matrix.rows)

    def spans(self) -> Sequence[Span]:
        return spans_of(self.layer.experts[self.expert][self.proj])

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        matrix, kind, sums = self.layer.experts[self.expert][self.proj], self.tensor.dtype, None
        shape = (len(self.layer.experts), matrix.rows, matrix.cols)
        if self.tensor.shape == shape and kind in native.BLOCK_TYPES:  # else structure reports it
            sums, source = ErrorStats(), MatrixReader(self.context.reader, matrix)
            reading = self.context.reading(self.layer, self.expert, self.proj)
            if reading:
                reading.scales(source.load_scales())
            row_bytes = native.blocks_bytes(kind, 1, matrix.cols)
            start, others = self.expert * matrix.rows * row_bytes, 0
            for chunk, view in source.views(buffers.source, buffers.bounce):
                if reading:
                    reading.decoded(chunk, native.decode(view), False)
                target = np.empty(len(chunk) * row_bytes, np.uint8)
                blocks = read_into(self.tensor, target, start + chunk.start * row_bytes)
                found = compared(kind, view, blocks)
                if found.other_codes:
                    self._fail(found.other_codes, chunk)
                others += found.other_codes
                sums.add(stats_of(found, view))
            if not others:
                self.errors.add(self.context, self.tensor.name, sums)
        advance(self.nbytes)
        return ItemResult(0, 0, 0, self.layer.index, self.expert, self.proj, sums)

    def _fail(self, count: int, chunk: range) -> None:
        words = (
            f"has {counted(count, 'code')} of expert {self.expert}, rows {chunk.start} to "
            f"{chunk.stop - 1}, farther from their source's weights than another code"
        )
        self.context.findings.fail_tensor(
            "weights", "element", self.tensor.name, self.tensor.file, words,
            layer=self.layer.index, expert=self.expert, projection=self.proj,
        )  # fmt: skip


class BiasesCheck(StackCheck, frozen=True):
    """The biases of a projection against their source."""

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def spans(self) -> Sequence[Span]:
        return []

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        matrices = [expert[self.proj] for expert in self.layer.experts]
        rows = matrices[0].rows
        if (self.tensor.dtype, *self.tensor.shape) == ("F32", len(matrices), rows):
            for expert, bias in enumerate(biases_of(self.context.reader, matrices)):
                target = np.empty(4 * rows, np.uint8)
                found = read_into(self.tensor, target, expert * target.nbytes).view("<f4")
                if (wrong := np.flatnonzero(found != bias)).size:
                    self.context.findings.fail_tensor(
                        "weights", "bias", self.tensor.name, self.tensor.file,
                        f"differs from the source's biases of expert {expert} in {wrong.size} "
                        f"rows, first in row {wrong[0]}",
                        layer=self.layer.index, expert=expert, projection=self.proj,
                    )  # fmt: skip
        advance(self.nbytes)
        return ItemResult(0)


class GgufVerifier(OutputVerifier):
    output: GgufOutput
    structure_class = GgufStructureCheck
    layers_class = GgufLayersCheck
    model_class = GgufModelCheck
    open = staticmethod(open_gguf_output)

    def check_options(self) -> None:
        self.refuse_packed_options("GGUF files")

    def thread_bytes(self) -> int:
        """Bytes of a thread: buffers, and as many again for the blocks that are compared."""
        return 2 * self.buffer_sizes().nbytes

    def buffer_sizes(self) -> BufferSizes:
        if self.output.plan is None:
            return BufferSizes()
        return stack_buffers(self.output.plan.target, list(self.output.source_layers.values()))

    def expert_checks(
        self, context: Context, share: float, rng: random.Random
    ) -> Iterator[Check[ItemResult]]:
        sources = self.output.source_layers if context.second else {}
        for (index, proj), tensor in self.output.experts.items():
            yield CopyCheck(context, unit_of(index), tensor, None)
            layer = sources.get(index)
            if layer is None or proj not in layer.projections:
                continue
            count = len(layer.experts)
            errors = StackErrors(count)
            for expert in sorted(rng.sample(range(count), max(1, round(count * share)))):
                yield BlocksCheck(context, tensor, layer, proj, expert, errors)
        for (index, proj), tensor in self.output.biases.items():
            yield CopyCheck(context, unit_of(index), tensor, None)
            layer = sources.get(index)
            if layer is not None and proj in layer.projections:
                yield BiasesCheck(context, tensor, layer, proj)

    def weights_facts(self, totals: Totals) -> Facts:
        counts = {index: len(layer.experts) for index, layer in self.output.source_layers.items()}
        return totals.as_dict(None, counts)
