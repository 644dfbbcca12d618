"""The work of a calibrated conversion: the matrices of one expert, with compensated codes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv import native
from ktconv.conversion.tasks import Advance
from ktconv.formats import FORMATS, Slice
from ktconv.formats.search import MULTIPLES
from ktconv.quantize.packed.folding import expert_exponents
from ktconv.quantize.packed.gptq.codes import FACTOR_COLS, TOGETHER_COLS, Factor, best_codes
from ktconv.quantize.packed.gptq.inputs import LayerInputs
from ktconv.quantize.packed.packing import Part, Piece
from ktconv.quantize.packed.task import QuantizeTask
from ktconv.quantize.packed.ways import Expert
from ktconv.source import MoELayer, Projection
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import source_bytes, spans_of
from ktconv.source.reading.reader import Span
from ktconv.system.arrays import F32, F64, I8
from ktconv.targets.packed.matrix_check import relative_errors
from ktconv.targets.packed.proof import CODES, COMPENSATED, ROW_ERROR_BOUND, Proof
from ktconv.writer.staging import Staging

TOKENS = "calibration_tokens"  # in the manifest, beside CODES
SEARCHED = "search"  # CODES of an expert with too few tokens
_DIGITS = 5  # of a bound


def expert_memory(layers: Sequence[MoELayer]) -> int:
    """Bytes that a worker needs at most for an expert of these layers, besides its buffers."""
    return max((_memory(layer) for layer in layers), default=0)


def _memory(layer: MoELayer) -> int:
    """A second moment as stored, whole, and in order, which becomes its factor, with columns of
    blocks; then weights as they are, in order, and as compensation leaves them, their codes, those
    of one more multiple and both once more, and errors of columns."""
    hidden, inner = layer.hidden_size, layer.intermediate_size
    largest = max(hidden, inner)
    factor = 4 * (3 * largest + 3 * FACTOR_COLS + 2 * TOGETHER_COLS) * largest
    return factor + (4 + 4 + 4 + 2 + 2) * hidden * inner


class CompensatedExpert(Struct, frozen=True):
    """A `Task`: all projections of one expert. gate and up have the same inputs, and so one
    factor."""

    expert: Expert
    inputs: LayerInputs

    @property
    def source_bytes(self) -> int:
        return sum(map(source_bytes, self.expert.matrices.values()))

    def spans(self) -> Sequence[Span]:
        return [span for matrix in self.expert.matrices.values() for span in spans_of(matrix)]

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        exponents = None
        if self.expert.options.fold:
            exponents = expert_exponents(self._matrix("down"), buffers)
        records: dict[str, Any] = {}
        for projections in self._with_same_inputs():
            factor = None
            if self.inputs.is_compensated(self.expert.number):
                factor = self.inputs.factor(self.expert.number, projections[0], exponents)
            for projection in projections:
                matrix = self._matrix(projection, exponents)
                if factor is not None:
                    matrix = matrix.compensated(factor, buffers)
                records |= matrix.run(staging, buffers, advance)
        return records

    def _matrix(self, projection: Projection, exponents: I8 | None = None) -> CalibratedMatrix:
        """A matrix with the codes of the search."""
        one = self.expert
        return CalibratedMatrix(
            one.reader, one.layer, one.number, projection, one.verify, one.options,
            self.inputs.importance(one.number, projection), exponents,
            tokens=int(self.inputs.counts[one.number]),
        )  # fmt: skip

    def _with_same_inputs(self) -> Iterator[list[Projection]]:
        yield [name for name in self.expert.matrices if name != "down"]
        yield ["down"]


class CalibratedMatrix(QuantizeTask, frozen=True):
    """One projection: with codes int8 [N, K] and scales [N, groups of columns] that are given, or
    those of the search."""

    tokens: int = 0  # of the expert
    codes: I8 | None = None
    scales: F32 | None = None

    def compensated(self, factor: Factor, buffers: Buffers) -> CalibratedMatrix:
        """The matrix with compensated codes."""
        fmt = FORMATS[self.options.method]
        weights = self._weights(buffers)
        scale = self._searched(weights)
        group_of_col = np.arange(weights.shape[1]) // (weights.shape[1] // scale.shape[1])
        codes, scales = best_codes(
            fmt.layout, weights, factor, scale, group_of_col.astype(np.int32)
        )
        return replace(self, codes=codes, scales=scales)

    def _weights(self, buffers: Buffers) -> F32:
        """The whole matrix as it is quantized. CheckpointError for a NaN or an infinity."""
        source = self.source()
        weights = np.empty((self.matrix.rows, self.matrix.cols), np.float32)
        for chunk, values in source.decoded(buffers.source, buffers.bounce):
            weights[chunk.start : chunk.stop] = source.finite(values, chunk.start)
        return weights

    def _searched(self, weights: F32) -> F32:
        """Scales [N, G] of all parts: those of down have columns of their own."""
        found = [self._part_scale(weights, self._owned(i)) for i in range(self.options.numa)]
        return np.concatenate(found, axis=1 if self.proj == "down" else 0)

    def _part_scale(self, weights: F32, owned: Slice) -> F32:
        layout, (rows, cols) = FORMATS[self.options.method].layout, owned.shape
        whole = weights.shape[1]
        view = native.Matrix(
            weights.reshape(-1).view(np.uint8), "F32", rows, cols,
            start=owned.row_start * whole + owned.col_start, row_stride=whole,
        )  # fmt: skip
        choice = native.Choice(self.options.rule, self._importance())
        _, scale = native.quantize(layout, view, choice.columns(owned.col_start, owned.col_stop))
        searched: F32 = scale.reshape(rows, -1)
        return searched

    # ---- packing what was chosen ----

    def _pack(
        self, pieces: Sequence[Piece], buffers: Buffers
    ) -> Iterable[tuple[native.Audit, native.ByteSums]]:
        if self.codes is None or self.scales is None:
            return super()._pack(pieces, buffers)
        return [self._packed(piece) for piece in pieces]

    def _packed(self, piece: Piece) -> tuple[native.Audit, native.ByteSums]:
        """Pack the codes and scales chosen for a piece."""
        assert self.codes is not None
        part, view, packed, scale = piece.part, piece.view, piece.packed, piece.scale
        owned, layout = part.owned, part.layout
        first = owned.row_start + piece.first_row
        rows = slice(first, first + view.rows)
        codes = layout.plain_codes(self.codes[rows, owned.col_start : owned.col_stop])
        own = self._own_scales(part)[rows].reshape(layout.scale_shape(view.rows, view.cols))
        scale[:] = native.pack_weight(layout, view.rows, view.cols, codes, own, packed)
        found = native.audit(layout, view, view.rows, 0, packed, scale, part.choice)
        return found, native.ByteSums(native.byte_sum(packed), native.byte_sum(scale))

    def _own_scales(self, part: Part) -> F32:
        """The columns of `scales` that a part has."""
        assert self.scales is not None
        if self.proj != "down":
            return self.scales
        count = self.scales.shape[1] // self.options.numa
        return self.scales[:, part.index * count : (part.index + 1) * count]

    def _proof(self, choice: native.Choice) -> Proof:
        if self.codes is None:
            return super()._proof(choice)
        return Proof(choice, factors=MULTIPLES, row_error=math.inf)

    def _facts(self, part: Part) -> dict[str, Any]:
        facts = {CODES: SEARCHED if self.codes is None else COMPENSATED, TOKENS: self.tokens}
        if self.codes is not None:
            facts[ROW_ERROR_BOUND] = bound_of(relative_errors(part.check.squares))
        return facts | super()._facts(part)


def bound_of(errors: F64) -> float:
    """The largest error of a row, rounded up to a few digits."""
    largest = float(errors.max())
    rounded = float(f"{largest:.{_DIGITS}g}")
    if rounded >= largest:
        return rounded
    return float(f"{rounded + 10.0 ** (math.floor(math.log10(largest)) + 1 - _DIGITS):.{_DIGITS}g}")
