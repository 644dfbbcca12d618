"""Task of one projection of a layer: the matrices of all experts, encoded one behind the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.conversion.tasks import Advance, write_piece, write_tensor
from ktconv.errors import CheckpointError, VerificationError
from ktconv.quantize.packed.importance.load import LayerWeights
from ktconv.source import ExpertMatrix, MoELayer, Projection
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import (
    MatrixReader,
    buffers_of,
    chunks,
    source_bytes,
    spans_of,
)
from ktconv.source.reading.reader import SourceReader, Span
from ktconv.system.arrays import F32, U8
from ktconv.system.checksums import Checksum
from ktconv.system.units import counted
from ktconv.targets.gguf.target import GgufTarget
from ktconv.targets.packed.matrix_check import ErrorStats
from ktconv.writer.staging import Staging

WHOLE = 32  # rows of sources that are not stored row by row, which the C library compares


def stack_buffers(target: GgufTarget, layers: Sequence[MoELayer]) -> BufferSizes:
    """Buffers that a worker needs to encode matrices of these layers."""
    kinds = (matrix for layer in layers for matrix in layer.kinds)
    return buffers_of(kinds, lambda one, rows: rows * (target.matrix_bytes(one) // one.rows))


class StackTask(Struct, frozen=True):
    """One projection of all experts of a layer."""

    reader: SourceReader
    layer: MoELayer
    proj: Projection
    verify: bool
    target: GgufTarget
    weights: LayerWeights | None  # of squared errors; None: all count the same

    @property
    def matrices(self) -> list[ExpertMatrix]:
        return [expert[self.proj] for expert in self.layer.experts]

    @property
    def source_bytes(self) -> int:
        return sum(map(source_bytes, self.matrices))

    def spans(self) -> Sequence[Span]:
        return [span for matrix in self.matrices for span in spans_of(matrix)]

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        name = self.target.tensor(self.layer, self.proj).name
        digest, done, sums = Checksum(), 0, ErrorStats()
        for expert, matrix in enumerate(self.matrices):
            remaining = source_bytes(matrix)
            for view, blocks in self._encoded(expert, matrix, buffers):
                target = buffers.readback[: blocks.nbytes] if self.verify else None
                with write_piece(staging, name, blocks, done, target) as found:
                    digest.update(found.data)
                    sums.add(self._compared(name, expert, view, found))
                done += blocks.nbytes
                part = min(remaining, matrix.nbytes(view.rows))
                remaining -= part
                advance(part)
            advance(remaining)
        records = {name: digest.record() | sums.record()}
        if (bias := self.target.bias(self.layer, self.proj)) is not None:
            rows = (one.view(np.uint8) for one in biases_of(self.reader, self.matrices))
            records[bias.name] = write_tensor(bias.name, rows, staging, self.verify)
        return records

    def _encoded(
        self, expert: int, matrix: ExpertMatrix, buffers: Buffers
    ) -> Iterator[tuple[native.Matrix, U8]]:
        source, kind = MatrixReader(self.reader, matrix), self.target.format.type
        importance = None
        if self.weights is not None:
            importance = np.ascontiguousarray(self.weights.of(expert, self.proj), np.float32)
        row_bytes = self.target.matrix_bytes(matrix) // matrix.rows
        with source.open() as fd:
            factors = source.load_scales()
            for chunk in chunks(matrix, matrix.rows):
                with source.loaded(fd, chunk, buffers.source, buffers.bounce) as data:
                    view = source.view(chunk, factors, data, 0, matrix.cols)
                    blocks = buffers.packed[: row_bytes * len(chunk)]
                    try:
                        native.encode_blocks(kind, view, importance, blocks, buffers.scratch)
                    except native.NonFiniteError as error:
                        raise source.not_finite(chunk.start + error.row, error.col) from error
                    except ValueError as error:
                        raise CheckpointError(
                            f"{matrix.tensor.name} has weights that are too large for {kind}, "
                            f"whose scales are at most 65504, in rows {chunk.start} to "
                            f"{chunk.stop - 1} of expert {expert}",
                            "use another format, such as --method fp8 or bf16",
                        ) from error
                    yield view, blocks

    def _compared(self, name: str, expert: int, view: native.Matrix, blocks: U8) -> ErrorStats:
        found = compared(self.target.format.type, view, blocks)
        if found.other_codes or not math.isfinite(found.squared_error):
            raise VerificationError(
                f"{name}, expert {expert}, has {counted(found.other_codes, 'code')} farther from "
                "their source's weights than another code",
                "check this machine's memory and disk, then run the same command again",
            )
        return stats_of(found, view)


def biases_of(reader: SourceReader, matrices: Sequence[ExpertMatrix]) -> Iterator[F32]:
    """The bias [rows] of each matrix; zeros for those without."""
    for matrix in matrices:
        bias = MatrixReader(reader, matrix).load_bias()
        yield np.zeros(matrix.rows, np.float32) if bias is None else np.ascontiguousarray(bias)


def compared(kind: str, view: native.Matrix, blocks: U8) -> native.EncodedAudit:
    """Errors of blocks, and codes that are not the nearest, by the audit's own decoders; by values
    alone where the C library does not take the shape."""
    if view.c.col_stride == 1 or view.rows % WHOLE == 0:
        return native.audit_blocks(kind, view, blocks)
    weights = native.decode(view)
    plain = native.Matrix(weights.reshape(-1).view(np.uint8), "F32", view.rows, view.cols)
    return native.audit_blocks(kind, plain, blocks)


def stats_of(found: native.EncodedAudit, view: native.Matrix) -> ErrorStats:
    return ErrorStats(*found[:5], view.rows * view.cols)
