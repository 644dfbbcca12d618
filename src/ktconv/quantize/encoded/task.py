"""Task of one expert matrix: decoded, encoded, written, read back, compared, some rows at a time;
or its codes copied, where the source has them already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ktconv import native
from ktconv.conversion.tasks import Advance, ExpertTask, Piece, write_tensor, written
from ktconv.errors import CheckpointError
from ktconv.formats.decode import f32_to_bf16
from ktconv.quantize.encoded.deviation import Deviation
from ktconv.quantize.encoded.passing import awq_codes, kept_codes, kept_scales
from ktconv.quantize.encoded.stored import second_scale, tensor_scale
from ktconv.source import ExpertMatrix, Projection
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import (
    MatrixReader,
    Scales,
    buffer_bytes,
    chunk_rows,
    chunks,
)
from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader
from ktconv.system.arrays import U8, Array
from ktconv.system.checksums import Checksum
from ktconv.system.opened import Opened
from ktconv.targets.encoded.kept import is_kept
from ktconv.targets.encoded.layouts.base import Sizes
from ktconv.targets.encoded.layouts.words import AWQ
from ktconv.targets.encoded.scheme import Scheme
from ktconv.targets.encoded.target import EncodedTarget, Plan, bias_tensors, weight_dtype
from ktconv.writer.staging import Staging

_INFINITE = 0x7C00  # of f16


def encoding_buffers(plan: Plan) -> BufferSizes:
    """Buffers that a worker needs to encode the matrices of a plan."""
    source, packed, cols = 0, 0, 1
    for matrix, scheme in _kinds(plan):
        rows = min(chunk_rows(matrix), matrix.rows)
        row_bytes = scheme.sizes(matrix.rows, matrix.cols, False).row_bytes
        source = max(source, buffer_bytes(matrix, rows))
        packed, cols = max(packed, rows * row_bytes), max(cols, matrix.cols)
    return BufferSizes(source, packed, cols)


def encoding_memory(plan: Plan) -> int:
    """Bytes of a worker besides its buffers: all scales of a matrix, its codes where they are not
    written row by row, and a second buffer where it is read twice."""
    most = 0
    for matrix, scheme in _kinds(plan):
        sizes = scheme.sizes(matrix.rows, matrix.cols, False)
        need = sizes.scale_shape[0] * sizes.scale_shape[1] * sizes.scale_bytes
        if not scheme.layout.streamed:
            need += 3 * sizes.rows * sizes.row_bytes
        if scheme.row.kind == "nvfp4":
            need += buffer_bytes(matrix, min(chunk_rows(matrix), matrix.rows)) + BOUNCE_BYTES
        most = max(most, need)
    return most


def _kinds(plan: Plan) -> Iterator[tuple[ExpertMatrix, Scheme]]:
    """One matrix of each kind, with each scheme of matrices of its shape."""
    for unit in plan.layers:
        first = unit.layer.experts[0]
        for proj, scheme in plan.target.schemes_of(unit.layer, unit.experts):
            shape = first[proj].rows, first[proj].cols
            for matrix in unit.layer.kinds:
                if (matrix.rows, matrix.cols) == shape:
                    yield matrix, scheme


@dataclass(frozen=True)
class EncodeTask(ExpertTask):
    """One projection of one expert."""

    target: EncodedTarget

    @cached_property
    def scheme(self) -> Scheme:
        return self.target.scheme_of(self.layer, self.expert, self.proj)

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        matrix, scheme, layout = self.matrix, self.scheme, self.scheme.layout
        half = weight_dtype(matrix) == "F16"
        sizes = scheme.sizes(matrix.rows, matrix.cols, half)
        module = self.target.module(self.layer, self.expert, self.proj)
        codes_of, *others = layout.tensors(module, sizes)
        encoder: _Encoder = _encoder(self, sizes, half)
        deviation = Deviation(scheme, "rtn", codes_of.name, half, encoder.factor, encoder.keeps)
        digest, done, remaining = Checksum(), 0, self.source_bytes
        whole = None if layout.streamed else np.empty((sizes.rows, sizes.row_bytes), np.uint8)
        with encoder.source.open() as fd:
            factors = encoder.source.load_scales()
            for chunk in chunks(matrix, matrix.rows):
                with encoder.encoded(fd, chunk, factors, buffers) as (view, codes, scales):
                    if whole is not None:
                        whole[chunk.start : chunk.stop] = codes.reshape(len(chunk), -1)
                    else:
                        staging.write(codes_of.name, codes.data, done)
                    zeros = encoder.zeros
                    zeros = None if zeros is None else zeros[chunk.start : chunk.stop]
                    found: AbstractContextManager[U8] = nullcontext(codes)
                    if whole is None and self.verify:
                        target = buffers.readback[: codes.nbytes]
                        piece = Piece(codes_of.name, target.nbytes, done)
                        found = written(staging, [piece], target)
                    with found as here:
                        if whole is None:
                            digest.update(here.data)
                        deviation.add(view, here, scales, zeros)
                    done += codes.nbytes
                remaining -= matrix.nbytes(len(chunk))
                advance(matrix.nbytes(len(chunk)))
        advance(remaining)  # block scales
        record: dict[str, Any] = digest.record()
        if whole is not None:
            stored = layout.whole(whole)
            record = write_tensor(codes_of.name, [stored], staging, self.verify)
        record |= deviation.finish()
        arrays = layout.others(sizes, encoder.scales, encoder.factor, encoder.zeros)
        return {
            codes_of.name: record,
            **{
                one.name: write_tensor(one.name, [_bytes(_bias(self))], staging, self.verify)
                for one in bias_tensors(module, matrix)
            },
            **{
                one.name: write_tensor(one.name, [_bytes(arrays[part])], staging, self.verify)
                for part, one in zip(layout.parts[1:], others, strict=True)
            },
        }


def _bias(task: EncodeTask) -> Array:
    """Bias as it is stored in the source, some rows of which may be those of another matrix."""
    matrix = task.matrix
    values = MatrixReader(task.reader, matrix).load_bias()
    assert values is not None and matrix.bias is not None
    if matrix.bias.number == "BF16":
        return f32_to_bf16(values)
    return values.astype("<f2" if matrix.bias.number == "F16" else "<f4")


def _bytes(array: Array) -> U8:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Encoder:
    """Codes and scales of one matrix, some rows at a time. `scales` are complete at the end."""

    scales: Array
    factor = 0.0
    zeros: U8 | None = None
    keeps = False

    def __init__(self, task: EncodeTask, sizes: Sizes, half: bool) -> None:
        self._task, self._sizes, self._half = task, sizes, half
        scheme, matrix = task.scheme, task.matrix
        # Of integers, weights are what the model computes with: half precision or bf16.
        rounded = scheme.row.is_int and not (half and scheme.is_half(half)) and not self.keeps
        self.source = MatrixReader(task.reader, matrix, round_to_bf16=rounded)

    @contextmanager
    def encoded(
        self, fd: Opened, chunk: range, factors: Scales | None, buffers: Buffers
    ) -> Iterator[tuple[native.Matrix, U8, Array]]:
        """The source of some rows, their codes and the scales of these rows, inside the block:
        what fails there can be the doing of a source that changed."""
        block = self._task.scheme.row.block
        with self.source.loaded(fd, chunk, buffers.source, buffers.bounce) as data:
            view = self.source.view(chunk, factors, data, 0, self._task.matrix.cols)
            scales = self.scales[chunk.start // block : -(-chunk.stop // block)]
            yield view, self._codes(chunk, view, data, scales, buffers), scales

    def _codes(
        self, chunk: range, view: native.Matrix, data: U8, scales: Array, buffers: Buffers
    ) -> U8:
        """Codes of a chunk, which `data` has, and its `scales`."""
        raise NotImplementedError


class _Rounded(_Encoder):
    """Codes rounded by kt_encode."""

    def __init__(self, task: EncodeTask, sizes: Sizes, half: bool) -> None:
        super().__init__(task, sizes, half)
        self._encoding = task.scheme.encoding(half)
        dtype = self._encoding.scale_array(sizes.rows, sizes.cols)
        self.scales = np.empty(sizes.scale_shape, dtype)
        if task.scheme.row.kind == "nvfp4":
            self.factor = second_scale(task.scheme, _largest(task))
        self._tensor_scale = tensor_scale(task.scheme, self.factor)

    def _codes(
        self, chunk: range, view: native.Matrix, data: U8, scales: Array, buffers: Buffers
    ) -> U8:
        codes = buffers.packed[: self._sizes.row_bytes * len(chunk)]
        try:
            native.encode(self._encoding, view, self._tensor_scale, codes, scales, buffers.scratch)
        except native.NonFiniteError as error:
            raise self.source.not_finite(chunk.start + error.row, error.col) from error
        if self._encoding.half and (scales == _INFINITE).any():
            matrix, row = self._task.matrix, int(np.argwhere(scales == _INFINITE)[0][0])
            raise CheckpointError(
                f"{matrix.tensor.name} has weights of which f16 scales are infinite, in row "
                f"{chunk.start + row} of its matrix",
                "use a format with bf16 or float32 scales",
            )
        if self._encoding.kind == "bf16" and self._task.matrix.element.name not in ("BF16", "F16"):
            wrong = np.flatnonzero(codes.view(np.uint16) & 0x7F80 == 0x7F80)
            if wrong.size:
                row, col = divmod(int(wrong[0]), self._task.matrix.cols)
                tensor = self._task.matrix.tensor.name
                raise CheckpointError(
                    f"{tensor} has a weight that is beyond bf16, at [{chunk.start + row}, {col}] "
                    "of its matrix",
                    "use a format with scales, such as --method fp8",
                )
        return codes


class _KeptAwq(_Encoder):
    """The source's own, with its zero points, in the order of INT4."""

    keeps = True

    def __init__(self, task: EncodeTask, sizes: Sizes, half: bool) -> None:
        super().__init__(task, sizes, half)
        found = self.source.load_scales()
        assert found is not None and found.zero_point is not None
        self.scales = found.scale.astype("<f2").view(np.uint16)
        self.zeros = found.zero_point.astype(np.uint8)

    def _codes(
        self, chunk: range, view: native.Matrix, data: U8, scales: Array, buffers: Buffers
    ) -> U8:
        return awq_codes(self.source, chunk, data, scales.shape[1])


class _Kept(_Encoder):
    """The source's own."""

    keeps = True

    def __init__(self, task: EncodeTask, sizes: Sizes, half: bool) -> None:
        super().__init__(task, sizes, half)
        is_half = task.scheme.is_half(half)
        self.scales, self.factor = kept_scales(task.scheme, self.source, is_half)
        self.scales = self.scales.reshape(sizes.scale_shape)

    def _codes(
        self, chunk: range, view: native.Matrix, data: U8, scales: Array, buffers: Buffers
    ) -> U8:
        stored = data[: self._task.matrix.nbytes(len(chunk))]
        codes = kept_codes(self._task.scheme, self._task.matrix, stored)
        if self._task.matrix.element.name == "F8_E4M3" and (codes & 0x7F == 0x7F).any():
            row, col = divmod(int(np.flatnonzero(codes & 0x7F == 0x7F)[0]), self._sizes.cols)
            raise self.source.not_finite(chunk.start + row, col)
        return codes


def _encoder(task: EncodeTask, sizes: Sizes, half: bool) -> _Encoder:
    if not task.target.options.requantize and is_kept(task.scheme, task.matrix, half):
        return (_KeptAwq if task.scheme.layout is AWQ else _Kept)(task, sizes, half)
    return _Rounded(task, sizes, half)


def _largest(task: EncodeTask) -> float:
    """The largest magnitude of the matrices that share a second scale: engines compute gate and up
    as one matrix, with one scale."""
    expert = task.layer.experts[task.expert]
    together: Sequence[Projection] = ("down",) if task.proj == "down" else ("gate", "up")
    return max(largest_of(task.reader, expert[proj]) for proj in together if proj in expert)


def largest_of(reader: SourceReader, matrix: ExpertMatrix) -> float:
    """The largest magnitude of a matrix. CheckpointError for a NaN or an infinity."""
    source, most = MatrixReader(reader, matrix), 0.0
    rows = min(chunk_rows(matrix), matrix.rows)
    buffer, bounce = (np.empty(n, np.uint8) for n in (buffer_bytes(matrix, rows), BOUNCE_BYTES))
    for chunk, view in source.views(buffer, bounce):
        try:
            most = max(most, native.largest(view))
        except native.NonFiniteError as error:
            raise source.not_finite(chunk.start + error.row, error.col) from error
    return most
