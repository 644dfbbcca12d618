"""The work of quantize-cpu: one expert matrix quantized, packed, written and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktconv import native
from ktconv.checkpoint import MoELayer
from ktconv.conversion.tasks import Advance, ExpertTask, four_digits, write_tensor
from ktconv.errors import VerificationError
from ktconv.formats import FORMATS, Format, Kind, Slice, TensorId, kinds_of, split, tensor_name
from ktconv.formats.folding import encode, folded_importance
from ktconv.native import Layout
from ktconv.packed.matrix_check import MatrixCheck, Packed, Violation
from ktconv.packed.proof import Proof
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.matrices import Factors, MatrixReader, Scales, buffer_bytes, chunk_rows, chunks
from ktconv.system.arrays import F32, I8, U8
from ktconv.targets.ktransformers import Options
from ktconv.writer.staging import Staging


def quantize_buffers(layers: Sequence[MoELayer], fmt: Format) -> BufferSizes:
    """What a worker needs to quantize these layers."""
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


class Part:
    """One part of a matrix while its chunks arrive: checksum, scales, comparison."""

    def __init__(
        self, index: int, owned: Slice, layout: Layout, choice: native.Choice, check: MatrixCheck
    ) -> None:
        self.index, self.owned, self.layout, self.check = index, owned, layout, check
        self.choice = choice
        self.digest = hashlib.sha256()
        self.scale = native.aligned_bytes(layout.scale_size(*owned.shape))
        self.rows_done = 0
        self.bytes_done = 0


@dataclass(frozen=True)
class QuantizeTask(ExpertTask):
    """One projection of one expert: decode, quantize, pack, write, read back, compare."""

    options: Options
    importance: F32 | None = None  # [cols] of the matrix: what squared errors count
    exponents: I8 | None = None  # [I] of factors between up and down; None: nothing is folded

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        parts = [self._part(index) for index in range(self.options.numa)]
        remaining = self.source_bytes
        source = self._source()
        with source.open() as fd:
            scales = source.load_scales()
            for chunk in chunks(self.matrix, parts[0].owned.shape[0]):
                count = source.read(fd, chunk, buffers.source, buffers.bounce)
                for part in parts:
                    if part.owned.row_start <= chunk.start < part.owned.row_stop:
                        self._convert(source, chunk, scales, part, staging, buffers)
                remaining -= count
                advance(count)
        advance(remaining)  # block scales, biases
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
        layer, options = self.layer, self.options
        owned = split(self.proj, layer.hidden_size, layer.intermediate_size, index, options.numa)
        weight = TensorId(layer.index, self.proj, self.expert, index, "weight")
        fmt = FORMATS[options.method]
        choice = native.Choice(options.scale, self._importance())
        choice = choice.columns(owned.col_start, owned.col_stop)
        check = MatrixCheck(fmt, weight, *owned.shape, _refuse, self._proof(choice))
        return Part(index, owned, fmt.layout, choice, check)

    def _importance(self) -> F32 | None:
        """Of the columns as they are quantized."""
        if self.exponents is None or self.proj != "down" or self.options.scale != "search":
            return self.importance
        return folded_importance(self.importance, self.exponents)

    def _name(self, part: Part, kind: Kind) -> str:
        return tensor_name(self.layer.index, self.proj, self.expert, part.index, kind)

    def _convert(
        self,
        source: MatrixReader,
        chunk: range,
        scales: Scales | None,
        part: Part,
        staging: Staging,
        buffers: Buffers,
    ) -> None:
        """Quantize and pack the columns of a chunk that a part owns."""
        first_col, cols = part.owned.col_start, part.owned.shape[1]
        view = source.view(chunk, scales, buffers.source, first_col, cols)
        packed = buffers.packed[: native.packed_size(part.layout, view.rows, cols)]
        done = part.rows_done, part.rows_done + view.rows
        start, stop = (part.layout.scale_size(rows, cols) for rows in done)
        scale = part.scale[start:stop]
        try:
            self._pack(part, view, packed, scale, buffers)
        except native.NonFiniteError as error:
            raise source.not_finite(chunk.start + error.row, first_col + error.col) from error
        name = self._name(part, "weight")
        staging.write(name, packed.data, part.bytes_done)
        if self.verify:
            written = buffers.readback[: packed.nbytes]
            staging.read(name, written.data, part.bytes_done)
            packed = written
        part.digest.update(packed.data)
        part.check.compare(view, part.rows_done, Packed(packed, scale, view.rows))
        part.rows_done += view.rows
        part.bytes_done += packed.nbytes

    def _pack(
        self, part: Part, view: native.Matrix, packed: U8, scale: U8, buffers: Buffers
    ) -> None:
        """The next rows of a part into `packed` and `scale`. NonFiniteError for a NaN or Inf."""
        native.quantize_pack(part.layout, view, packed, scale, buffers.scratch, part.choice)

    def _proof(self, choice: native.Choice) -> Proof:
        """What must hold of a part whose columns have this choice."""
        return Proof(choice)

    def _facts(self, part: Part) -> dict[str, Any]:
        """What the manifest records of a part's weights beside checksum and errors."""
        return {}

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

    def _finish(self, parts: Sequence[Part], staging: Staging) -> dict[str, Any]:
        """Writes the scales; returns the manifest's record of each tensor."""
        records: dict[str, Any] = {}
        for part in parts:
            name = self._name(part, "scale")
            scale = write_tensor(name, [part.scale], staging, self.verify)
            errors = part.check.finish().as_dict()
            records[self._name(part, "weight")] = {
                "sha256": part.digest.hexdigest(),
                "relative_rms_error": four_digits(errors["relative_rms_error"]),
                "max_error_steps": four_digits(errors["max_error_steps"]),
                "zero_share": four_digits(errors["zero_share"]),
            }
            records[self._name(part, "weight")] |= self._facts(part)
            if part.check.kept_rows:
                records[self._name(part, "weight")]["lossless_rows"] = part.check.kept_rows
            if self.exponents is not None and self.proj == "up":
                own = self.exponents[part.owned.row_start : part.owned.row_stop]
                records[self._name(part, "weight")]["fold"] = encode(own)
            records[name] = scale
        return records


def _refuse(violation: Violation) -> None:
    """What was just packed does not match its source."""
    raise VerificationError(
        violation.message,
        "check this machine's memory and disk, then run the same command again",
    )
