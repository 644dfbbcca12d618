"""The work of quantize-cpu: one expert matrix quantized, packed, written and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktconv import native
from ktconv.conversion.tasks import Advance, write_tensor
from ktconv.formats import Format, kinds_of
from ktconv.formats.folding import encode, folded_importance
from ktconv.quantize.packed.packing import PackingTask, Part
from ktconv.source import MoELayer
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import (
    Factors,
    MatrixReader,
    Scales,
    buffer_bytes,
    chunk_rows,
    chunks,
)
from ktconv.system.arrays import F32, I8, U8
from ktconv.targets.packed.proof import Proof
from ktconv.writer.staging import Staging


def quantize_buffers(layers: Sequence[MoELayer], fmt: Format) -> BufferSizes:
    """Buffers that a worker needs to quantize these layers."""
    source, packed, cols = 0, 0, 1
    seen = set()
    for layer in layers:
        for matrix in layer.kinds:
            key = (matrix.element, matrix.rows, matrix.cols, matrix.col_stride == 1)
            if key in seen:
                continue
            seen.add(key)
            rows = min(chunk_rows(matrix), matrix.rows)
            source = max(source, buffer_bytes(matrix, rows))
            packed = max(packed, fmt.layout.weight_size(rows, matrix.cols))
            cols = max(cols, matrix.cols)
    return BufferSizes(source, packed, cols)


@dataclass(frozen=True)
class QuantizeTask(PackingTask):
    """One projection of one expert: decode, quantize, pack, write, read back, compare."""

    importance: F32 | None = None  # [cols] of the matrix: what squared errors count
    exponents: I8 | None = None  # [I] of factors between up and down; None: nothing is folded

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        parts = [self._part(index) for index in range(self.options.numa)]
        remaining = self.source_bytes
        source = self._source()
        with source.open() as fd:
            scales = source.load_scales()
            for chunk in chunks(self.matrix, parts[0].owned.shape[0]):
                with source.loaded(fd, chunk, buffers.source, buffers.bounce) as data:
                    for part in parts:
                        if part.owned.row_start <= chunk.start < part.owned.row_stop:
                            self._convert(source, chunk, scales, part, staging, buffers, data)
                count = self.matrix.nbytes(len(chunk))
                remaining -= count
                advance(count)
        if remaining:  # block scales, biases
            advance(remaining)
        return self._finish(parts, staging) | self._write_biases(parts, source.load_bias(), staging)

    def _source(self) -> MatrixReader:
        """The matrix as it is quantized."""
        return MatrixReader(
            self.reader,
            self.matrix,
            self.options.compat,
            self.options.keep_integers,
            None if self.exponents is None else Factors.of(self.proj, self.exponents),
        )

    def _part(self, index: int) -> Part:
        owned = self._owned(index)
        importance, rule = self._importance(), self.options.rule
        if importance is None:
            choice = native.Choice.plain(rule)
        else:
            choice = native.Choice(rule, importance).columns(owned.col_start, owned.col_stop)
        return self._new_part(index, owned.shape, choice, self._proof(choice))

    def _importance(self) -> F32 | None:
        """Importance of the columns as they are quantized."""
        if self.exponents is None or self.proj != "down" or self.options.scale != "search":
            return self.importance
        return folded_importance(self.importance, self.exponents)

    def _convert(
        self,
        source: MatrixReader,
        chunk: range,
        scales: Scales | None,
        part: Part,
        staging: Staging,
        buffers: Buffers,
        data: U8,
    ) -> None:
        """Quantize and pack the columns of a chunk, which `data` has, that a part owns."""
        first_col, cols = part.owned.col_start, part.owned.shape[1]
        view = source.view(chunk, scales, data, first_col, cols)
        try:
            self._write_rows(view, part, staging, buffers)
        except native.NonFiniteError as error:
            raise source.not_finite(chunk.start + error.row, first_col + error.col) from error

    def _proof(self, choice: native.Choice) -> Proof:
        """Conditions of a part whose columns have this choice."""
        return Proof(choice)

    def _facts(self, part: Part) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if part.check.kept_rows:
            facts["lossless_rows"] = part.check.kept_rows
        if self.exponents is not None and self.proj == "up":
            facts["fold"] = encode(self.exponents[part.owned.row_start : part.owned.row_stop])
        return facts

    def _write_biases(
        self, parts: Sequence[Part], bias: F32 | None, staging: Staging
    ) -> dict[str, Any]:
        """Each part's, in float32; zeros where only other matrices of the layer have one."""
        if bias is None:
            bias = np.zeros(self.matrix.rows, np.float32)
        records: dict[str, Any] = {}
        for part in parts:
            if "bias" in kinds_of(self.proj, part.index, self.layer.biased):
                own = bias[part.owned.row_start : part.owned.row_stop].view(np.uint8)
                name = self._name(part, "bias")
                records[name] = write_tensor(name, [own], staging, self.verify)
        return records
