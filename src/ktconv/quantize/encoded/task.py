"""Task of one expert matrix: decoded, encoded, written, read back, compared, some rows at a time;
or its codes copied, where the source has them already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from ktconv import native
from ktconv.conversion.pipeline import Task
from ktconv.conversion.tasks import (
    Advance,
    ExpertTask,
    Stretch,
    write_piece,
    write_stretches,
    write_tensor,
)
from ktconv.conversion.together import have_room
from ktconv.errors import CheckpointError
from ktconv.formats.decode import f32_to_bf16
from ktconv.quantize.encoded.deviation import Deviation, is_compared
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
    loaded_together,
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
from ktconv.writer.shards import Tensor
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


class EncodeTask(ExpertTask, frozen=True, dict=True):
    """One projection of one expert."""

    target: EncodedTarget

    @cached_property
    def scheme(self) -> Scheme:
        return self.target.scheme_of(self.layer, self.expert, self.proj)

    @cached_property
    def half(self) -> bool:
        """Whether the source's weights are f16."""
        return weight_dtype(self.matrix) == "F16"

    @cached_property
    def sizes(self) -> Sizes:
        return self.scheme.sizes(self.matrix.rows, self.matrix.cols, self.half)

    @cached_property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors of a matrix without its bias, codes first."""
        module = self.target.module(self.layer, self.expert, self.proj)
        return self.scheme.layout.tensors(module, self.sizes)

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes, scales and what belongs to them."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def keeps(self) -> bool:
        """Whether codes and scales are the source's own."""
        return not self.target.options.requantize and is_kept(self.scheme, self.matrix, self.half)

    @cached_property
    def rounds_rows(self) -> bool:
        """Whether the C library rounds and compares some rows of it at a time, which are written
        as they are."""
        if self.keeps or not self.scheme.layout.streamed:
            return False
        matrix, encoding = self.matrix, self.scheme.encoding(self.half)
        return is_compared(encoding, matrix.rows, matrix.cols, matrix.col_stride != 1)

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        if self.rounds_rows and have_room([self], buffers):
            return encode_together([self], staging, buffers, advance)
        matrix, scheme, layout = self.matrix, self.scheme, self.scheme.layout
        half, sizes, (codes_of, *others) = self.half, self.sizes, self.tensors
        encoder = _encoder(self)
        deviation = Deviation(scheme, "rtn", codes_of.name, half, encoder.factor, encoder.keeps)
        digest, done, remaining = Checksum(), 0, self.source_bytes
        whole = None if layout.streamed else np.empty((sizes.rows, sizes.row_bytes), np.uint8)
        with encoder.source.open() as fd:
            factors = encoder.source.load_scales()
            for chunk in chunks(matrix, matrix.rows):
                with encoder.encoded(fd, chunk, factors, buffers) as (view, codes, scales):
                    zeros = encoder.zeros
                    zeros = None if zeros is None else zeros[chunk.start : chunk.stop]
                    if whole is not None:
                        whole[chunk.start : chunk.stop] = codes.reshape(len(chunk), -1)
                        deviation.add(view, codes, scales, zeros)
                    else:
                        target = buffers.readback[: codes.nbytes] if self.verify else None
                        with write_piece(staging, codes_of.name, codes, done, target) as here:
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
            **_bias_records(self, staging),
            **{
                one.name: write_tensor(one.name, [_bytes(arrays[part])], staging, self.verify)
                for part, one in zip(layout.parts[1:], others, strict=True)
            },
        }


def rounded(task: Task) -> EncodeTask | None:
    """The task if others like it can be run with it, by `encode_together`."""
    return task if isinstance(task, EncodeTask) and task.rounds_rows else None


def encode_together(
    tasks: Sequence[EncodeTask], staging: Staging, buffers: Buffers, advance: Advance
) -> dict[str, Any]:
    """Convert matrices whose rows are rounded, in one step if buffers have room for all, else one
    after the other; the manifest's records of their tensors."""
    if not have_room(tasks, buffers):
        return {
            name: one for task in tasks for name, one in task.run(staging, buffers, advance).items()
        }
    largest: dict[tuple[int, Projection], float] = {}
    parts = [_Part(task, _Rounded(task, largest)) for task in tasks]
    places = _places(parts, staging, buffers.packed)
    wanted = [(one.encoder.source, range(one.task.matrix.rows)) for one in parts]
    with loaded_together(wanted, buffers.source, buffers.bounce) as found:
        stretches: dict[str, Stretch] = {}
        views = [part.view(data) for part, data in zip(parts, found, strict=True)]
        if any(part.task.scheme.row.kind == "nvfp4" for part in parts):
            for part, view in zip(parts, views, strict=True):
                largest[part.task.expert, part.task.proj] = part.largest(view, buffers.scratch)
        for part, view in zip(parts, views, strict=True):
            stretches |= part.encoded(view, places, buffers.scratch)
        in_order = [stretches[name] for name in places]
        write_stretches(in_order, staging, buffers.readback, tasks[0].verify)
    advance(sum(task.source_bytes for task in tasks))
    records: dict[str, Any] = {}
    for part in parts:
        codes_of, *others = part.task.tensors
        records[codes_of.name] = stretches[codes_of.name].digest.record() | part.deviation.finish()
        records |= _bias_records(part.task, staging)
        records |= {one.name: stretches[one.name].digest.record() for one in others}
    return records


def _places(parts: Sequence[_Part], staging: Staging, memory: U8) -> dict[str, U8]:
    """A place in memory for each tensor, in the order of the file: what lies one behind the other
    there does so here."""
    tensors = [tensor for part in parts for tensor in part.task.tensors]
    found: dict[str, U8] = {}
    used = 0
    for tensor in sorted(tensors, key=lambda tensor: staging.place(tensor.name)):
        found[tensor.name] = memory[used : used + tensor.nbytes]
        used += tensor.nbytes
    return found


class _Part:
    """A matrix that is encoded as a whole."""

    def __init__(self, task: EncodeTask, encoder: _Rounded) -> None:
        self.task, self.encoder = task, encoder
        self.deviation = Deviation(task.scheme, "rtn", task.tensors[0].name, task.half)

    def view(self, data: U8) -> native.Matrix:
        """The matrix that `data` has."""
        source, matrix = self.encoder.source, self.task.matrix
        return source.view(range(matrix.rows), source.load_scales(), data, 0, matrix.cols)

    def largest(self, view: native.Matrix, scratch: U8) -> float:
        """The largest magnitude. CheckpointError for a NaN or an infinity."""
        with self.encoder.source.only_finite():
            return native.largest(view, scratch)

    def encoded(
        self, view: native.Matrix, places: Mapping[str, U8], scratch: U8
    ) -> dict[str, Stretch]:
        """Encode the matrix into its places, and compare; what is to be written, by tensor."""
        task, encoder, (codes_of, *others) = self.task, self.encoder, self.task.tensors
        codes = places[codes_of.name]
        audit, sums = encoder.proven(view, codes, scratch)
        self.deviation.add_audit(audit, view.rows * view.cols)
        found = {codes_of.name: Stretch(codes_of.name, Checksum(), codes, 0, sums.packed)}
        layout = task.scheme.layout
        arrays = layout.others(task.sizes, encoder.scales, encoder.factor, encoder.zeros)
        for part, one in zip(layout.parts[1:], others, strict=True):
            stored, place = _bytes(arrays[part]), places[one.name]
            np.copyto(place, stored)
            as_compared = arrays[part] is encoder.scales
            total = sums.scale if as_compared else native.byte_sum(stored)
            found[one.name] = Stretch(one.name, Checksum(), place, 0, total)
        return found


def _bias_records(task: EncodeTask, staging: Staging) -> dict[str, Any]:
    """The manifest's record of a bias, which is written now, if there is one."""
    module = task.target.module(task.layer, task.expert, task.proj)
    return {
        one.name: write_tensor(one.name, [_bytes(_bias(task))], staging, task.verify)
        for one in bias_tensors(module, task.matrix)
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

    def __init__(self, task: EncodeTask) -> None:
        self._task, self._sizes = task, task.sizes
        scheme, matrix, half = task.scheme, task.matrix, task.half
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

    def __init__(
        self, task: EncodeTask, largest: dict[tuple[int, Projection], float] | None = None
    ) -> None:
        """`largest`: of `_largest`, for several matrices."""
        super().__init__(task)
        self._encoding = task.scheme.encoding(task.half)
        dtype = self._encoding.scale_array(task.sizes.rows, task.sizes.cols)
        self.scales = np.empty(task.sizes.scale_shape, dtype)
        self._largest: dict[tuple[int, Projection], float] = {} if largest is None else largest

    @cached_property
    def factor(self) -> float:  # type: ignore[override]
        if self._task.scheme.row.kind != "nvfp4":
            return 0.0
        return second_scale(self._task.scheme, _largest(self._task, self._largest))

    @cached_property
    def _tensor_scale(self) -> float:
        return tensor_scale(self._task.scheme, self.factor)

    def proven(
        self, view: native.Matrix, codes: U8, scratch: U8
    ) -> tuple[native.EncodedAudit, native.ByteSums]:
        """Encode the whole matrix into `codes` and `scales`, and compare them with it."""
        encoding, factor = self._encoding, self._tensor_scale
        with self.source.only_finite():
            found = native.encode_audit(encoding, view, factor, codes, self.scales, scratch)
        self._refuse_infinite(range(view.rows), codes, self.scales)
        return found

    def _codes(
        self, chunk: range, view: native.Matrix, data: U8, scales: Array, buffers: Buffers
    ) -> U8:
        codes = buffers.packed[: self._sizes.row_bytes * len(chunk)]
        with self.source.only_finite(chunk.start):
            native.encode(self._encoding, view, self._tensor_scale, codes, scales, buffers.scratch)
        self._refuse_infinite(chunk, codes, scales)
        return codes

    def _refuse_infinite(self, chunk: range, codes: U8, scales: Array) -> None:
        """CheckpointError for scales, or weights as bf16, that are infinite."""
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


class _KeptAwq(_Encoder):
    """The source's own, with its zero points, in the order of INT4."""

    keeps = True

    def __init__(self, task: EncodeTask) -> None:
        super().__init__(task)
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

    def __init__(self, task: EncodeTask) -> None:
        super().__init__(task)
        is_half = task.scheme.is_half(task.half)
        self.scales, self.factor = kept_scales(task.scheme, self.source, is_half)
        self.scales = self.scales.reshape(task.sizes.scale_shape)

    def _codes(
        self, chunk: range, view: native.Matrix, data: U8, scales: Array, buffers: Buffers
    ) -> U8:
        stored = data[: self._task.matrix.nbytes(len(chunk))]
        codes = kept_codes(self._task.scheme, self._task.matrix, stored)
        if self._task.matrix.element.name == "F8_E4M3" and (codes & 0x7F == 0x7F).any():
            row, col = divmod(int(np.flatnonzero(codes & 0x7F == 0x7F)[0]), self._sizes.cols)
            raise self.source.not_finite(chunk.start + row, col)
        return codes


def _encoder(task: EncodeTask) -> _Encoder:
    if task.keeps:
        return (_KeptAwq if task.scheme.layout is AWQ else _Kept)(task)
    return _Rounded(task)


def _largest(task: EncodeTask, known: dict[tuple[int, Projection], float]) -> float:
    """The largest magnitude of the matrices that share a second scale: engines compute gate and up
    as one matrix, with one scale. `known`: of each matrix of the layer that was read for it."""
    expert = task.layer.experts[task.expert]
    together: Sequence[Projection] = ("down",) if task.proj == "down" else ("gate", "up")
    together = [proj for proj in together if proj in expert]
    for proj in together:
        if (task.expert, proj) not in known:
            known[task.expert, proj] = largest_of(task.reader, expert[proj])
    return max(known[task.expert, proj] for proj in together)


def largest_of(reader: SourceReader, matrix: ExpertMatrix) -> float:
    """The largest magnitude of a matrix. CheckpointError for a NaN or an infinity."""
    source, most = MatrixReader(reader, matrix), 0.0
    for chunk, view in source.views():
        with source.only_finite(chunk.start):
            most = max(most, native.largest(view))
    return most
