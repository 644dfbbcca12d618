"""Levels structure and weights for experts on GPUs in one pass over the bytes: checksums, decoded
copies, and every expert's matrix, unpacked without compressed-tensors, against its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.formats.decode import f32_to_bf16
from ktconv.source import ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader, spans_of
from ktconv.source.reading.reader import Span
from ktconv.source.reading.streamed import Piece, Streamed, piece_rows
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED
from ktconv.targets.packed.matrix_check import ErrorStats
from ktconv.verify.encoded.module_check import ModuleCheck, bias_of
from ktconv.verify.encoded.output import EncodedOutput, Module
from ktconv.verify.encoded.quantization import Group
from ktconv.verify.encoded.rounding import RoundingCheck, Rules, bound_steps, rules_of
from ktconv.verify.encoded.stored import stored_parts
from ktconv.verify.encoded.unpack import SCALE_DTYPES, levels, values
from ktconv.verify.reading import Context, TensorStream, read_tensor
from ktconv.verify.reading_check import module_check
from ktconv.verify.runner import OTHER, Advance
from ktconv.verify.second_reader.numbers import floats_of
from ktconv.verify.totals import ItemResult

PARTS = PACK_QUANTIZED.parts
WHOLE = 32  # rows, columns and groups that the C library compares are multiples of this


class IntegerCheck(ModuleCheck, frozen=True):
    """The three tensors of one projection of one expert in pack-quantized integers."""

    group: Group
    rules: Rules

    def _is_sound(self, matrix: ExpertMatrix) -> bool:
        return is_sound(self.module, self.group, matrix)

    def _check_alone(self, streams: Mapping[str, TensorStream]) -> None:
        """Checks that weight_shape is the shape of the matrix."""
        tensor, packed = self.module.parts.get(PARTS[2]), self.module.parts.get(PARTS[0])
        if tensor is None or packed is None or len(packed.shape) != 2:
            return
        if tensor.shape != (2,) or tensor.dtype not in ("I32", "I64"):
            return  # reported by level structure
        data = streams[PARTS[2]].read(np.empty(tensor.nbytes, np.uint8))
        recorded = data.view(np.int64 if tensor.dtype == "I64" else np.int32).tolist()
        actual = [packed.shape[0], packed.shape[1] * 32 // self.group.bits]
        if self.matrix is not None:
            actual = [self.matrix.rows, self.matrix.cols]
        if recorded != actual:
            words, at = f"says {recorded}, but the matrix is {actual}", self.module.at
            self.context.findings.fail_tensor(
                "structure", "wrong shape", tensor.name, tensor.file, words, **at
            )

    def _compare(
        self, matrix: ExpertMatrix, streams: Mapping[str, TensorStream], buffers: Buffers
    ) -> ErrorStats:
        packed, scaled = (self.module.parts[part] for part in PARTS[:2])
        data = streams[PARTS[1]].read(np.empty(scaled.nbytes, np.uint8))
        scale = floats_of(data, scaled.dtype).reshape(matrix.rows, -1)
        check = RoundingCheck(
            self.group, self.rules, scaled.dtype, self.module.name, self._where, self._report
        )
        source = MatrixReader(self.context.reader, matrix, round_to_bf16=scaled.dtype == "BF16")
        reading = self._reading(source)
        encoding = self._encoding(matrix, scaled.dtype)
        stored = data.view(np.uint16).reshape(matrix.rows, -1) if encoding else None
        for chunk, view in source.views(buffers.source, buffers.bounce):
            weights = native.decode(view) if reading or encoding is None else None
            if reading:
                assert weights is not None
                reading.decoded(chunk, weights, source.round_to_bf16)
            words = streams[PARTS[0]].read(
                np.empty(len(chunk) * packed.nbytes // matrix.rows, np.uint8)
            )
            if encoding is not None and stored is not None and not view.rows % WHOLE:
                found = native.audit_encoded(
                    encoding, view, words, stored[chunk.start : chunk.stop]
                )
                if check.accepts(found, view.rows * view.cols):
                    continue
            weights = native.decode(view) if weights is None else weights
            level = levels(words, len(chunk), matrix.cols, self.group.bits)
            check.compare(weights, level, scale[chunk.start : chunk.stop], chunk.start)
        return check.finish()

    def _encoding(self, matrix: ExpertMatrix, dtype: str) -> native.Encoding | None:
        """Encoding by which the C library proves such a matrix: rounding to nearest, with two-byte
        scales."""
        group = self.group.group_size or 0
        whole = not (matrix.cols % WHOLE or group % WHOLE)
        if not (self.rules.elements and self.rules.scales and whole) or dtype == "F32":
            return None
        return native.Encoding(f"int{self.group.bits}", group, dtype == "F16")


class DecodedCheck(Struct, frozen=True):
    """A non-expert matrix that is block-quantized in the source and bf16 in the output."""

    context: Context
    tensor: TensorRef  # in the output
    matrix: ExpertMatrix  # in the source

    unit = OTHER

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def spans(self) -> Sequence[Span]:
        return spans_of(self.matrix)

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        stream, equal = TensorStream(self.context, self.tensor), True
        source = MatrixReader(self.context.reader, self.matrix, round_to_bf16=True)
        reading = None
        if self.context.second is not None:
            reading = module_check(self.context.second, self.context.findings, self.matrix)
        if reading:
            reading.scales(source.load_scales())
        for chunk, decoded in source.decoded(buffers.source, buffers.bounce):
            if reading:
                reading.decoded(chunk, decoded, source.round_to_bf16)
            expected = f32_to_bf16(decoded).reshape(-1).view(np.uint8)
            found = stream.read(np.empty_like(expected))
            equal = equal and np.array_equal(found, expected)
            advance(found.nbytes)
        if not equal:
            self.context.fail_copy(self.tensor, "differs from the decoded source")
        return ItemResult(self.nbytes, int(stream.check() is not None), 1)


def is_sound(module: Module, group: Group, matrix: ExpertMatrix) -> bool:
    """Whether all tensors have the dtypes and shapes of the group; else level structure reports
    it."""
    if not module.whole:
        return False
    packed, scale = (module.parts[part] for part in PARTS[:2])
    return (
        packed.dtype == "I32"
        and packed.shape == (matrix.rows, group.words(matrix.cols))
        and scale.dtype in SCALE_DTYPES
        and scale.shape == (matrix.rows, group.scales(matrix.cols))
    )


def dequantized(output: EncodedOutput, layer: MoELayer, expert: int, proj: Projection) -> Streamed:
    """The values [rows, cols] of a matrix of an output that passed level structure."""
    module, matrix = output.experts[layer.index, expert, proj], layer.experts[expert][proj]
    if output.layout is not PACK_QUANTIZED:
        stored = stored_parts(output.scheme_of(module), module, matrix)
        return Streamed(matrix.rows, matrix.cols, stored.pieces, bias_of(module))
    group = output.quantization.group_of(module.name)
    assert group is not None and is_sound(module, group, matrix)
    pieces = partial(_pieces, module, matrix, group)
    return Streamed(matrix.rows, matrix.cols, pieces, bias_of(module))


def _pieces(module: Module, matrix: ExpertMatrix, group: Group) -> Iterator[Piece]:
    packed, scale = (module.parts[part] for part in PARTS[:2])
    scale_of = floats_of(read_tensor(scale), scale.dtype).reshape(matrix.rows, -1)
    row_bytes = packed.nbytes // matrix.rows
    for first in range(0, matrix.rows, piece_rows(matrix.cols)):
        rows = slice(first, min(first + piece_rows(matrix.cols), matrix.rows))
        count = rows.stop - rows.start
        data = read_tensor(packed, first * row_bytes, count * row_bytes)
        level = levels(data, count, matrix.cols, group.bits)
        yield Piece(rows, slice(0, matrix.cols), values(level, scale_of[rows]))


def largest_error(output: EncodedOutput) -> float | None:
    """The largest error of rounding to nearest, in steps; None for other methods, and where a
    search chose scales: it may cut the largest weights of a group off."""
    if not rules_of(output.method, output.ours).elements or output.layout is not PACK_QUANTIZED:
        return None
    if output.scheme is not None and output.scheme.search:
        return None
    scales = (module.parts.get(PARTS[1]) for module in output.modules.values())
    found = {scale.dtype for scale in scales if scale is not None}
    coarsest = next((dtype for dtype in SCALE_DTYPES if dtype in found), "BF16")
    return max(bound_steps(group, coarsest) for group in output.quantization.groups)
