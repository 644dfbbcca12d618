"""The work of quantize-cpu: one expert matrix quantized, packed, written and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktconv import native
from ktconv.checkpoint import ExpertMatrix, MoELayer, Projection
from ktconv.conversion.copying import changed_on_disk
from ktconv.errors import VerificationError
from ktconv.formats import FORMATS, Format, TensorId, packed_shape, tensor_name
from ktconv.packed.matrix_check import MatrixCheck, Packed, Violation
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.matrices import ITEM_SIZE, Chunk, Grid, MatrixReader, chunk_rows, chunks
from ktconv.reading.reader import SourceReader, Span
from ktconv.targets.ktransformers import Options, matrix_source_bytes
from ktconv.writer.staging import Staging


def quantize_buffers(layers: Sequence[MoELayer], fmt: Format) -> BufferSizes:
    """What a worker needs to quantize these layers."""
    source, packed, cols = 0, 0, 1
    seen = set()
    for layer in layers:
        strided = layer.experts[0]["gate"].col_stride != 1
        key = (layer.encoding, layer.hidden_size, layer.intermediate_size, strided)
        if key in seen:
            continue
        seen.add(key)
        for matrix in layer.experts[0].values():
            rows = min(chunk_rows(matrix), matrix.rows)
            source = max(source, rows * matrix.cols * ITEM_SIZE[matrix.tensor.dtype])
            packed = max(packed, fmt.weight_nbytes(rows, matrix.cols))
            cols = max(cols, matrix.cols)
    return BufferSizes(source, packed, cols)


class Part:
    """One part of a matrix while its chunks arrive: checksum, scales, check."""

    def __init__(self, rows: int, check: MatrixCheck) -> None:
        self.digest = hashlib.sha256()
        self.scale = np.empty(rows, np.float32)
        self.check = check
        self.rows_done = 0
        self.bytes_done = 0


@dataclass(frozen=True, slots=True)
class QuantizeTask:
    """One projection of one expert: decode, quantize, pack, write, read back, compare."""

    reader: SourceReader
    layer: MoELayer
    expert: int
    proj: Projection
    options: Options
    verify: bool  # compare what the file holds instead of what was packed

    @property
    def matrix(self) -> ExpertMatrix:
        return self.layer.experts[self.expert][self.proj]

    @property
    def source_bytes(self) -> int:
        return matrix_source_bytes(self.layer, self.expert, self.proj)

    def spans(self) -> Sequence[Span]:
        matrix = self.matrix
        size = ITEM_SIZE[matrix.tensor.dtype]
        last = (matrix.rows - 1) * matrix.row_stride + (matrix.cols - 1) * matrix.col_stride
        start = matrix.tensor.offset + matrix.start * size
        return [Span(matrix.tensor.file, start, (last + 1) * size)]

    def run(
        self, staging: Staging, buffers: Buffers, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        rows, cols = self._packed_shape()
        parts = [Part(rows, self._check(part, rows, cols)) for part in range(self.options.numa)]
        remaining = self.source_bytes
        source = self._source()
        with source.open() as fd:
            grid = source.load_scales()
            part_rows = self.matrix.rows if self.proj == "down" else rows
            for chunk in chunks(self.matrix, part_rows):
                count = source.read(fd, chunk, buffers.source, buffers.bounce)
                self._convert(chunk, grid, parts, staging, buffers)
                remaining -= count
                advance(count)
        advance(remaining)  # block scales
        return self._finish(parts, staging)

    def _source(self) -> MatrixReader:
        return MatrixReader(self.reader, self.matrix, self.options.compat)

    def _packed_shape(self) -> tuple[int, int]:
        layer = self.layer
        return packed_shape(
            self.proj, layer.hidden_size, layer.intermediate_size, self.options.numa
        )

    def _name(self, part: int, kind: Any) -> str:
        return tensor_name(self.layer.index, self.proj, self.expert, part, kind)

    def _convert(
        self,
        chunk: Chunk,
        grid: Grid | None,
        parts: Sequence[Part],
        staging: Staging,
        buffers: Buffers,
    ) -> None:
        rows, cols = self._packed_shape()
        touched = range(len(parts)) if self.proj == "down" else [chunk.start // rows]
        for index in touched:
            first_col = index * cols if self.proj == "down" else 0
            view = self._source().view(chunk, grid, buffers.source, first_col, cols)
            part = parts[index]
            packed = buffers.packed[: native.packed_size(self.options.method, view.rows, cols)]
            scale = part.scale[part.rows_done : part.rows_done + view.rows]
            try:
                native.quantize_pack(self.options.method, view, packed, scale, buffers.scratch)
            except native.NonFiniteError as error:
                row, col = chunk.start + error.row, first_col + error.col
                raise self._source().not_finite(row, col) from error
            name = self._name(index, "weight")
            staging.write(name, packed.data, part.bytes_done)
            if self.verify:
                written = buffers.readback[: packed.nbytes]
                staging.read(name, written.data, part.bytes_done)
                packed = written
            part.digest.update(packed.data)
            part.check.compare(view, part.rows_done, Packed(packed, scale, view.rows))
            part.rows_done += view.rows
            part.bytes_done += packed.nbytes

    def _check(self, part: int, rows: int, cols: int) -> MatrixCheck:
        weight = TensorId(self.layer.index, self.proj, self.expert, part, "weight")
        return MatrixCheck(FORMATS[self.options.method], weight, rows, cols, _refuse)

    def _finish(self, parts: Sequence[Part], staging: Staging) -> dict[str, Any]:
        """Write the scales; what the manifest says of each tensor."""
        records: dict[str, Any] = {}
        for index, part in enumerate(parts):
            scale = part.scale.view(np.uint8)
            name = self._name(index, "scale")
            staging.write(name, scale.data, 0)
            if self.verify:
                written = np.empty_like(scale)
                staging.read(name, written.data, 0)
                if not np.array_equal(written, scale):
                    raise changed_on_disk(name)
            errors = part.check.finish().as_dict()
            records[self._name(index, "weight")] = {
                "sha256": part.digest.hexdigest(),
                "relative_rms_error": _rounded(errors["relative_rms_error"]),
                "max_error_steps": _rounded(errors["max_error_steps"]),
                "zero_share": _rounded(errors["zero_share"]),
            }
            records[name] = {"sha256": hashlib.sha256(scale.data).hexdigest()}
        return records


def _refuse(violation: Violation) -> None:
    """What was packed a moment ago does not hold its source."""
    raise VerificationError(
        violation.message,
        "suspect the disk or memory of this machine; run the same command again",
    )


def _rounded(value: float) -> float:
    """Four digits: enough to compare, and the same on every ISA."""
    return float(f"{value:.4g}")
