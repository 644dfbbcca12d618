"""Levels 1 and 2 for experts on GPUs in one pass over the bytes: checksums, copies, and every
expert's matrix, unpacked without compressed-tensors, against its source."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import ExpertMatrix, TensorRef
from ktconv.moe.streamed import Piece, Streamed, piece_rows
from ktconv.packed.matrix_check import ErrorStats, Violation
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.matrices import MatrixReader, chunk_rows, chunks
from ktconv.verify.claims import check_claims
from ktconv.verify.copies import OTHER
from ktconv.verify.gpu.output import PARTS, GpuOutput, Module
from ktconv.verify.gpu.quantization import Group
from ktconv.verify.gpu.rounding import RoundingCheck, Rules, bound_steps, rules_of
from ktconv.verify.gpu.unpack import F32, SCALE_DTYPES, levels, scales, values
from ktconv.verify.reading import Context, TensorStream, read_tensor
from ktconv.verify.runner import Advance
from ktconv.verify.totals import ItemResult

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

LEVEL = "weights"
_PER_ELEMENT = 6  # bytes of a chunk: float32, a level, and at most as much of packed words
_ROUNDING_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ModuleCheck:
    """One projection of one expert: its three tensors, and its source if there is one."""

    context: Context
    module: Module
    group: Group
    rules: Rules
    matrix: ExpertMatrix | None  # None: checksums and shape only

    @property
    def unit(self) -> str:
        layer = self.module.layer
        return OTHER if layer is None else f"layer-{layer:05d}"

    @property
    def nbytes(self) -> int:
        """Of progress: source bytes if they are read, else packed ones."""
        if self.matrix is not None:
            return self.matrix.nbytes(self.matrix.rows)
        return self.module.nbytes

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        streams = {
            part: TensorStream(self.context, tensor) for part, tensor in self.module.parts.items()
        }
        self._shape(streams)
        sums = None
        if self.matrix is not None and self.sound:
            sums = self._compare(self.matrix, streams, buffers)
        for stream in streams.values():
            stream.read_rest(buffers.source)
        checked = [stream.check() for stream in streams.values()]
        if sums is not None and all(one.equal for one in checked):
            # Of other bytes the manifest tells nothing.
            check_claims(self.context, self.module.parts[PARTS[0]].name, sums)
        checksums = sum(one.compared for one in checked)
        advance(self.nbytes)
        where = self.module.where
        if where is None:
            return ItemResult(self.module.nbytes, checksums)
        layer, nbytes = self.module.layer, self.module.nbytes
        return ItemResult(nbytes, checksums, 0, layer, where.expert, where.proj, sums)

    @property
    def sound(self) -> bool:
        """Whether dtypes and shapes are those of its group; else level structure says so."""
        return self.matrix is not None and _is_sound(
            self.module, self.group, self.matrix.rows, self.matrix.cols
        )

    def _shape(self, streams: Mapping[str, TensorStream]) -> None:
        """weight_shape says rows and columns of the matrix, as its tensors do."""
        tensor, packed = self.module.parts.get(PARTS[2]), self.module.parts.get(PARTS[0])
        if tensor is None or packed is None or len(packed.shape) != 2:
            return
        if tensor.shape != (2,) or tensor.dtype not in ("I32", "I64"):  # as level structure reports
            return
        data = streams[PARTS[2]].read(np.empty(tensor.nbytes, np.uint8))
        recorded = data.view(np.int64 if tensor.dtype == "I64" else np.int32).tolist()
        actual = [packed.shape[0], packed.shape[1] * 32 // self.group.bits]
        if self.matrix is not None:
            actual = [self.matrix.rows, self.matrix.cols]
        if recorded != actual:
            self.context.findings.fail_tensor(
                "structure",
                "wrong shape",
                tensor.name,
                tensor.file,
                f"says {recorded}, but the matrix is {actual}",
                **self.module.at,
            )

    def _compare(
        self, matrix: ExpertMatrix, streams: Mapping[str, TensorStream], buffers: Buffers
    ) -> ErrorStats:
        assert self.context.reader is not None
        packed, scaled = (self.module.parts[part] for part in PARTS[:2])
        data = streams[PARTS[1]].read(np.empty(scaled.nbytes, np.uint8))
        scale = scales(data, scaled.dtype, matrix.rows)
        at = self.module.at
        where = f"layer {at['layer']}, expert {at['expert']}, {at['projection']}"
        check = RoundingCheck(
            self.group, self.rules, scaled.dtype, self.module.name, where, self._fail
        )
        source = MatrixReader(self.context.reader, matrix, round_to_bf16=scaled.dtype == "BF16")
        with source.open() as fd:
            grid = source.load_scales()
            for chunk in chunks(matrix, matrix.rows):
                rows = chunk.stop - chunk.start
                source.read(fd, chunk, buffers.source, buffers.bounce)
                weights = native.decode(source.view(chunk, grid, buffers.source, 0, matrix.cols))
                words = np.empty(rows * packed.nbytes // matrix.rows, np.uint8)
                level = levels(streams[PARTS[0]].read(words), rows, matrix.cols, self.group.bits)
                check.compare(weights, level, scale[chunk.start : chunk.stop], chunk.start)
        return check.finish()

    def _fail(self, violation: Violation) -> None:
        file = self.module.parts[PARTS[0]].file.name
        self.context.findings.fail(LEVEL, **asdict(violation), file=file, **self.module.at)


@dataclass(frozen=True, slots=True)
class DecodedCheck:
    """A matrix of no expert that was block-quantized in the source and is bf16 here."""

    context: Context
    tensor: TensorRef  # in the output
    matrix: ExpertMatrix  # in the source

    unit = OTHER

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        assert self.context.reader is not None
        stream, equal = TensorStream(self.context, self.tensor), True
        source = MatrixReader(self.context.reader, self.matrix, round_to_bf16=True)
        with source.open() as fd:
            grid = source.load_scales()
            for chunk in chunks(self.matrix, self.matrix.rows):
                source.read(fd, chunk, buffers.source, buffers.bounce)
                view = source.view(chunk, grid, buffers.source, 0, self.matrix.cols)
                expected = _bf16(native.decode(view)).reshape(-1).view(np.uint8)
                found = stream.read(np.empty_like(expected))
                equal = equal and bool(np.array_equal(found, expected))
                advance(found.nbytes)
        if not equal:
            self.context.fail_copy(self.tensor, "differs from the decoded source")
        return ItemResult(self.nbytes, stream.check().compared, 1)


def _bf16(values: F32) -> U16:
    """The bits of values that are bf16 already: the upper halves."""
    return np.ascontiguousarray(values.view(np.uint16)[:, 1::2])


def rows_of(tensor: TensorRef, rows: int, wanted: slice) -> TensorRef:
    """Where some of the rows of a row-major tensor lie."""
    row_bytes = tensor.nbytes // rows
    start = tensor.offset + wanted.start * row_bytes
    return replace(tensor, offset=start, nbytes=(wanted.stop - wanted.start) * row_bytes)


def _is_sound(module: Module, group: Group, rows: int, cols: int) -> bool:
    if not module.whole:
        return False
    packed, scale, _ = (module.parts[part] for part in PARTS)
    return (
        packed.dtype == "I32"
        and packed.shape == (rows, group.words(cols))
        and scale.dtype in SCALE_DTYPES
        and scale.shape == (rows, group.scales(cols))
    )


def dequantized(output: GpuOutput, module: Module, matrix: ExpertMatrix) -> Streamed:
    """The values of a packed module [rows, cols], whose tensors level structure found sound."""
    group = output.quantization.group_of(module.name)
    assert group is not None and _is_sound(module, group, matrix.rows, matrix.cols)
    return Streamed(matrix.rows, matrix.cols, lambda: _pieces(module, matrix, group))


def _pieces(module: Module, matrix: ExpertMatrix, group: Group) -> Iterator[Piece]:
    packed, scale = (module.parts[part] for part in PARTS[:2])
    scale_of = scales(read_tensor(scale), scale.dtype, matrix.rows)
    for first in range(0, matrix.rows, piece_rows(matrix.cols)):
        rows = slice(first, min(first + piece_rows(matrix.cols), matrix.rows))
        data = read_tensor(rows_of(packed, matrix.rows, rows))
        level = levels(data, rows.stop - rows.start, matrix.cols, group.bits)
        yield Piece(rows, slice(0, matrix.cols), values(level, scale_of[rows]))


# ---- all of them -----------------------------------------------------------------------


def expert_checks(
    output: GpuOutput, context: Context, share: float, rng: random.Random
) -> Iterator[ModuleCheck]:
    """Of a share of the experts, at least one in every layer, and of whatever else is packed."""
    chosen = {
        (layer, expert)
        for layer, experts in output.layers.items()
        for expert in rng.sample(experts, max(1, round(len(experts) * share)))
    }
    sources = output.source_layers if context.compare else {}
    rules = rules_of(output.method, output.ours)
    for module in output.modules.values():
        group = output.quantization.group_of(module.name) or output.quantization.groups[0]
        matrix = None
        if module.where is not None and module.layer is not None:
            if (module.layer, module.where.expert) not in chosen:
                continue
            layer = sources.get(module.layer)
            if layer is not None and module.where.expert < len(layer.experts):
                matrix = layer.experts[module.where.expert][module.where.proj]
        yield ModuleCheck(context, module, group, rules, matrix)


def buffer_sizes(output: GpuOutput) -> BufferSizes:
    """What a worker needs to read any matrix of the source."""
    sizes = (one.nbytes(min(chunk_rows(one), one.rows)) for one in _matrices(output))
    return BufferSizes(max(sizes, default=0))


def thread_bytes(output: GpuOutput) -> int:
    """Of a thread that reads and compares: its buffers, a chunk as float32 with its levels, and
    what some rows of it take while they are rounded again."""
    decoded = max(map(_chunk_elements, _matrices(output)), default=0)
    return buffer_sizes(output).nbytes + _PER_ELEMENT * decoded + _ROUNDING_BYTES


def _matrices(output: GpuOutput) -> list[ExpertMatrix]:
    """One of each kind that is decoded."""
    layers = output.source_layers.values()
    experts = [matrix for layer in layers for matrix in layer.experts[0].values()]
    return [*experts, *output.decoded.values()]


def _chunk_elements(matrix: ExpertMatrix) -> int:
    return min(chunk_rows(matrix), matrix.rows) * matrix.cols


def largest_error(output: GpuOutput) -> float | None:
    """In steps, that rounding to nearest can make; None where something else chose the levels."""
    if not rules_of(output.method, output.ours).elements:
        return None
    scales = (module.parts.get(PARTS[1]) for module in output.modules.values())
    found = {scale.dtype for scale in scales if scale is not None}
    coarsest = next((dtype for dtype in SCALE_DTYPES if dtype in found), "BF16")
    return max(bound_steps(group, coarsest) for group in output.quantization.groups)
