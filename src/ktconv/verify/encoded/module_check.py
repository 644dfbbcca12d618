"""Levels structure and weights of one expert's matrix: its tensors are read once, for checksums and
for the comparison with the source, which differs by format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import asdict

from ktconv.source import ExpertMatrix, MoELayer
from ktconv.source.encodings.base import BIAS
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader, spans_of
from ktconv.source.reading.reader import Span
from ktconv.system.abstract_record import AbstractRecord
from ktconv.system.arrays import F32
from ktconv.targets.packed.matrix_check import ErrorStats, Violation
from ktconv.verify.encoded.output import Module
from ktconv.verify.reading import Context, TensorStream, check_claims, read_tensor
from ktconv.verify.reading_check import ReadingCheck
from ktconv.verify.runner import OTHER, Advance, unit_of
from ktconv.verify.second_reader.numbers import floats_of
from ktconv.verify.totals import ItemResult

Streams = Mapping[str, TensorStream]  # by part of the layout


class ModuleCheck(AbstractRecord, frozen=True):
    """The tensors of one projection of one expert, against their source if it is given."""

    context: Context
    module: Module
    matrix: ExpertMatrix | None  # None: checksums, and what follows from the tensors alone
    source: MoELayer | None  # the layer of `matrix`

    @property
    def unit(self) -> str:
        layer = self.module.layer
        return OTHER if layer is None else unit_of(layer)

    @property
    def nbytes(self) -> int:
        """Bytes of progress: of the source if it is read, else encoded ones."""
        if self.matrix is not None:
            return self.matrix.nbytes(self.matrix.rows)
        return self.module.nbytes

    def spans(self) -> Sequence[Span]:
        return [] if self.matrix is None else spans_of(self.matrix)

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        streams = {
            part: TensorStream(self.context, tensor) for part, tensor in self.module.parts.items()
        }
        self._check_alone(streams)
        sums = None
        if self.matrix is not None and self._is_sound(self.matrix):
            sums = self._compare(self.matrix, streams, buffers)
            compare_bias(self.context, self.module, self.matrix, streams)
        for stream in streams.values():
            stream.read_rest(buffers.source)
        checked = [stream.check() for stream in streams.values()]
        if sums is not None and all(checked):  # of other bytes the manifest says nothing
            check_claims(self.context, self._codes_name, sums)
        checksums = sum(equal is not None for equal in checked)
        advance(self.nbytes)
        where, layer, nbytes = self.module.where, self.module.layer, self.module.nbytes
        if where is None:
            return ItemResult(nbytes, checksums)
        return ItemResult(nbytes, checksums, 0, layer, where.expert, where.proj, sums)

    def _check_alone(self, streams: Streams) -> None:
        """Reports what the tensors show without their source."""
        return

    @property
    def _codes_name(self) -> str:
        """Name of the tensor with the codes, under which the manifest records errors."""
        return f"{self.module.name}.{self.module.layout.parts[0]}"

    @property
    def _where(self) -> str:
        at = self.module.at
        return f"layer {at['layer']}, expert {at['expert']}, {at['projection']}"

    def _report(self, violation: Violation) -> None:
        file = self.module.parts[self.module.layout.parts[0]].file.name
        self.context.findings.fail("weights", **asdict(violation), file=file, **self.module.at)

    def _reading(self, source: MatrixReader) -> ReadingCheck | None:
        """The check of how the source is read, which begins with its scales."""
        where = self.module.where
        assert where is not None and self.source is not None
        reading = self.context.reading(self.source, where.expert, where.proj)
        if reading:
            reading.scales(source.load_scales())
        return reading

    @abstractmethod
    def _is_sound(self, matrix: ExpertMatrix) -> bool:
        """Whether all tensors have their dtypes and shapes; else level structure reports it."""

    @abstractmethod
    def _compare(self, matrix: ExpertMatrix, streams: Streams, buffers: Buffers) -> ErrorStats:
        """Compares codes and scales with the source, and reports what is wrong."""


def bias_of(module: Module) -> F32 | None:
    """The values of a module's bias, if it has one."""
    tensor = module.parts.get(BIAS)
    return None if tensor is None else floats_of(read_tensor(tensor), tensor.dtype)


def compare_bias(
    context: Context, module: Module, matrix: ExpertMatrix, streams: Mapping[str, TensorStream]
) -> None:
    """A failure where it is not the source's. What is missing, or of another dtype or shape, is
    reported by level structure."""
    tensor = module.parts.get(BIAS)
    if tensor is None or matrix.bias is None:
        return
    if tensor.dtype != matrix.bias.number or tensor.shape != (matrix.rows,):
        return
    found = floats_of(streams[BIAS].read(np.empty(tensor.nbytes, np.uint8)), tensor.dtype)
    expected = MatrixReader(context.reader, matrix).load_bias()
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        words = f"differs from the source's biases in {wrong.size} rows, first in row {wrong[0]}"
        context.findings.fail_tensor(
            "weights", "bias", tensor.name, tensor.file, words, **module.at
        )
