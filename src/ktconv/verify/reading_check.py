"""Compares how the converter reads a weight of the source with the second reader's way.

Scales, zero points and groups are compared completely, values in a part of every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats.decode import round_to_bf16, rounded
from ktconv.source import PROJECTIONS, ExpertMatrix, MoELayer, Projection, TensorRef
from ktconv.source.reading.matrices import MatrixReader, Scales, buffer_bytes
from ktconv.system.arrays import F32, U8
from ktconv.verify.findings import Findings
from ktconv.verify.second_reader import Adapted, SecondReader, UnknownWeightError, Weight
from ktconv.verify.second_reader.numbers import floats_of

Numbers = NDArray[np.signedinteger[Any]]

LEVEL, CHECK = "weights", "reading"
_ROWS, _COLS = 2, 32  # of a chunk whose values are compared, along the stored rows
_STRIDE = 7919  # a prime: the places in chunks and matrices are not the same ones


class ReadingCheck(Struct):
    """The check of one matrix; reports at most one difference of each kind."""

    findings: Findings
    matrix: ExpertMatrix
    name: str  # of the weight, for messages
    weight: Weight | Adapted
    at: dict[str, Any] = field(default_factory=dict)  # the fields of a failure that locate it
    number: int = 0  # differs from matrix to matrix
    _reported: bool = False

    def scales(self, found: Scales | None) -> None:
        """Scales, zero points, groups, and the scales with which integers can be kept."""
        weight, grid = self.weight, self.matrix.scale
        if found is None or grid is None or weight.scale is None:
            if (found is None) != (weight.scale is None):
                self._fail("has scales by one of two ways to read it only")
            return
        assert weight.row_of is not None and weight.col_of is not None
        rows, cols = self.matrix.rows, self.matrix.cols
        row_of = (grid.row_origin % grid.block_rows + np.arange(rows)) // grid.block_rows
        col_of: Numbers = (grid.col_origin % grid.block_cols + np.arange(cols)) // grid.block_cols
        if found.group_of_col is not None:
            col_of = found.group_of_col
        row, here_row, there_row = _pairs(row_of, weight.row_of)
        col, here_col, there_col = _pairs(col_of, weight.col_of)
        for what, here, there in (
            ("scale", found.scale, weight.scale),
            ("zero point", found.zero_point, weight.zero),
        ):
            ours, theirs = _at(here, here_row, here_col), _at(there, there_row, there_col)
            differs = ours != theirs
            if differs.any():
                i, j = np.argwhere(differs)[0]
                self._differs(f"the {what} of", int(row[i]), int(col[j]), ours[i, j], theirs[i, j])
                return
        self._row_scale(found)

    def _row_scale(self, found: Scales) -> None:
        weight = self.weight
        assert weight.scale is not None and weight.row_of is not None
        zero = np.zeros(1) if weight.zero is None else weight.zero
        expected = None
        if (
            weight.scale.shape[1] == 1
            and weight.middle is not None
            and (zero == weight.middle).all()
        ):
            expected = weight.scale[weight.row_of, 0]
        if found.row_scale is None or expected is None:
            same = found.row_scale is expected
        else:
            same = np.array_equal(found.row_scale, expected)
        if not same:
            self._fail("has integers that can be kept by one of two ways to read it only")

    def chunk(self, chunk: range, first_col: int, cols: int) -> tuple[range, range]:
        """Rows and columns of a chunk to compare; they begin and end with stored units."""
        unit = self.matrix.element
        place = chunk.start + self.number * _STRIDE
        if self.matrix.col_stride == 1:
            return _some(chunk, _ROWS * unit.unit_rows, place), range(first_col, first_col + cols)
        step = max(_COLS, unit.unit_cols)
        return chunk, _some(range(first_col, first_col + cols), step, place // _COLS)

    def values(self, rows: range, cols: range, found: F32, rounded: bool) -> None:
        """`found`: what the converter's way makes of these rows and columns; `rounded` to bf16."""
        if self._reported:
            return
        expected = self.weight.values(rows, cols)
        if isinstance(self.weight, Adapted):
            slack = self.weight.slack(rows, cols)
            low, high = ((expected + sign * slack).astype(np.float32) for sign in (-1, 1))
            if rounded:
                low, high = round_to_bf16(low), round_to_bf16(high)
            differs = np.argwhere(~((found >= low) & (found <= high)))
        else:
            expected = round_to_bf16(expected) if rounded else expected
            differs = np.argwhere((found != expected) & ~(np.isnan(found) & np.isnan(expected)))
        if len(differs):
            row, col = differs[0]
            self._differs("the value at", rows[row], cols[col], found[row, col], expected[row, col])

    def decoded(self, chunk: range, found: F32, rounded: bool) -> None:
        """Compare a part of a whole chunk."""
        rows, cols = self.chunk(chunk, 0, self.matrix.cols)
        first = rows.start - chunk.start
        self.values(rows, cols, found[first : first + len(rows), cols.start : cols.stop], rounded)

    def view(
        self,
        source: MatrixReader,
        scales: Scales | None,
        chunk: range,
        data: U8,
        first_col: int,
        cols: int,
    ) -> None:
        """Compares values of a chunk that `source` has read into `data`, in columns from
        `first_col` on, as the audit gets them."""
        if self._reported:
            return
        rows, wide = self.chunk(chunk, first_col, cols)
        if self.matrix.col_stride == 1:
            data = data[buffer_bytes(self.matrix, rows.start - chunk.start) :]
        found = native.decode(source.view(rows, scales, data, wide.start, len(wide)))
        self.values(rows, wide, found, source.round_to_bf16)

    def _differs(self, what: str, row: int, col: int, ours: Any, theirs: Any) -> None:
        self._fail(
            f"was read wrongly: {what} [{row}, {col}] is {float(ours):.9g} by the converter's way "
            f"and {float(theirs):.9g} by that of verify",
            row=row, column=col, source_value=float(theirs), value=float(ours),
        )  # fmt: skip

    def _fail(self, words: str, **where: Any) -> None:
        self._reported = True
        tensor = self.matrix.tensor
        message = f"{self.name} in {tensor.file.name} {words}."
        self.findings.fail(
            LEVEL, CHECK, message, file=tensor.file.name, tensor=tensor.name, **self.at, **where
        )


def expert_check(
    second: SecondReader, findings: Findings, layer: MoELayer, expert: int, proj: Projection
) -> ReadingCheck | None:
    """The check of an expert's matrix; None, and a failure, where the second reader finds none."""
    matrix = layer.experts[expert][proj]
    at = {"layer": layer.index, "expert": expert, "projection": proj}
    name = f"{proj} of expert {expert} of layer {layer.index} ({matrix.tensor.name})"
    number = 3 * (layer.index * len(layer.experts) + expert) + PROJECTIONS.index(proj)
    with _unknown_reported(findings, at):
        weight = second.expert(layer, expert, proj)
        return ReadingCheck(findings, matrix, name, weight, at, number)
    return None


def module_check(
    second: SecondReader, findings: Findings, matrix: ExpertMatrix
) -> ReadingCheck | None:
    """`expert_check` for a weight that is no expert's."""
    name = matrix.tensor.name
    with _unknown_reported(findings, {}):
        weight = second.module(name, matrix.rows, matrix.cols)
        return ReadingCheck(findings, matrix, name, weight)
    return None


class SumsCheck(Struct):
    """The check of a matrix that is no expert's and that adapters are added to; reports at most
    one difference."""

    findings: Findings
    tensor: TensorRef
    weight: Weight | Adapted

    def run(self, stored: Callable[[range], U8], step: int) -> None:
        """Compare `step` rows at a time; `stored`: the bytes of some rows in the output."""
        dtype, (count, width) = self.tensor.dtype, self.tensor.shape
        cols = range(width)
        for rows in _pieces(count, step):
            found = floats_of(stored(rows), dtype).reshape(len(rows), width)
            expected = self.weight.values(rows, cols)
            slack = self.weight.slack(rows, cols) if isinstance(self.weight, Adapted) else 0.0
            low, high = (
                rounded(np.asarray(expected + sign * slack, np.float32), dtype) for sign in (-1, 1)
            )
            differs = np.argwhere(~((found >= low) & (found <= high)))
            if len(differs):
                row, col = differs[0]
                self.findings.fail(
                    LEVEL, CHECK,
                    f"{self.tensor.name} with the adapters of the source is {found[row, col]:.9g} "
                    f"at [{rows[row]}, {col}], and {expected[row, col]:.9g} by verify's own way.",
                    tensor=self.tensor.name,
                )  # fmt: skip
                return


class EncodedSumsCheck(Struct):
    """The check of FP8 codes and scales of a matrix that adapters are added to."""

    findings: Findings
    tensor: TensorRef
    weight: Adapted
    scales: NDArray[np.float64]  # of all blocks
    scale_bytes: int  # of one of them
    powers: bool  # they must be powers of two

    def run(self, stored: Callable[[range], U8], step: int) -> None:
        """Compare scales, then codes; `stored`: codes of some rows. Reports one difference."""
        source, (rows, cols) = self.weight.weight, self.tensor.shape
        assert source.scale is not None
        assert source.row_of is not None and source.col_of is not None
        scales = self.scales.reshape(source.scale.shape)
        low, high = np.zeros(scales.shape), np.zeros(scales.shape)
        every, pieces = range(cols), _pieces(rows, step)
        for piece in pieces:
            sums = np.abs(self.weight.values(piece, every).astype(np.float64))
            slack = self.weight.slack(piece, every)
            at = source.row_of[piece.start : piece.stop, None], source.col_of[None, :]
            np.maximum.at(low, at, sums - slack)
            np.maximum.at(high, at, sums + slack)
        if not self._check_scales(scales, low, high):
            return
        for piece in pieces:
            own = scales[np.ix_(source.row_of[piece.start : piece.stop], source.col_of)]
            if not self._check_codes(piece, stored(piece), own):
                return

    def _check_scales(self, scales: Any, low: Any, high: Any) -> bool:
        """A scale is the largest magnitude over 448; in few bits it may be larger, of a power of
        two by the factor 2."""
        with np.errstate(divide="ignore"):
            power = np.log2(scales) == np.rint(np.log2(scales))
        wide = 1.0 if self.powers else {4: 2.0**-20, 2: 2.0**-7}[self.scale_bytes]
        most = np.maximum(high, 1e-30) / 448 * (1 + wide) + (2.0**-24 if wide == 2.0**-7 else 0)
        least = np.maximum(low, 1e-30) / 448 * (1 - 2.0**-20)
        if wide == 1.0:
            smallest = 2.0**-24 if self.scale_bytes == 2 else 2.0**-126
            most, least = np.maximum(most, smallest), np.where(power, least, np.inf)
        differs = np.argwhere(~((scales >= least) & (scales <= most)))
        if len(differs):
            row, col = differs[0]
            self._fail(f"has the scale {scales[row, col]:.9g} in block [{row}, {col}], where the "
                       f"largest sum is {high[row, col]:.9g}")  # fmt: skip
        return not len(differs)

    def _check_codes(self, rows: range, codes: U8, scales: Any) -> bool:
        """A code is at most half a step from the sum."""
        cols = range(self.tensor.shape[1])
        sizes = (codes.reshape(len(rows), len(cols)) & 0x7F).astype(np.int64)
        power, part = sizes >> 3, sizes & 7
        level = np.ldexp(np.where(power, 8.0 + part, part), np.maximum(power, 1) - 10)
        step = np.ldexp(1.0, np.maximum(power, 1) - 10)
        found = np.where(codes.reshape(sizes.shape) & 0x80, -level, level) * scales
        sums = self.weight.values(rows, cols).astype(np.float64)
        bound = step * scales * (0.5 + 2.0**-10) + self.weight.slack(rows, cols)
        differs = np.argwhere(~(np.abs(found - sums) <= bound) | (sizes == 0x7F))
        if len(differs):
            row, col = differs[0]
            self._fail(f"is {found[row, col]:.9g} at [{rows[row]}, {col}], and the sum by verify's "
                       f"own way {sums[row, col]:.9g}")  # fmt: skip
        return not len(differs)

    def _fail(self, words: str) -> None:
        message = f"{self.tensor.name} with the adapters of the source {words}."
        self.findings.fail(LEVEL, CHECK, message, tensor=self.tensor.name)


def sums_check(
    second: SecondReader, findings: Findings, tensor: TensorRef
) -> SumsCheck | EncodedSumsCheck | None:
    """The check of a tensor of the source; None, and a failure, where the second reader finds no
    weight of its shape."""
    with _unknown_reported(findings, {}):
        weight = second.module(tensor.name, *tensor.shape)
        if tensor.dtype != "F8_E4M3":
            return SumsCheck(findings, tensor, weight)
        scale = second.scale_of(tensor.name)
        assert isinstance(weight, Adapted) and scale is not None
        scales, size = second.new_scales(scale)
        powers = size == 1 or second.scales_are_powers
        return EncodedSumsCheck(findings, tensor, weight, scales, size, powers)
    return None


def _pieces(rows: int, step: int) -> list[range]:
    return [range(first, min(first + step, rows)) for first in range(0, rows, step)]


@contextmanager
def _unknown_reported(findings: Findings, at: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except UnknownWeightError as error:
        findings.fail(LEVEL, CHECK, f"{error}.", **at)


def _some(whole: range, size: int, place: int) -> range:
    """`size` numbers of a range, which begin at a multiple of `size` of it."""
    places = max(1, len(whole) // size)
    start = whole.start + place % places * size
    return range(start, min(start + size, whole.stop))


def _pairs(here: Numbers, there: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Every combination of the numbers of two arrays once: where it first occurs, and both."""
    both = here.astype(np.int64) * (int(there.max(initial=0)) + 1) + there
    _, first = np.unique(both, return_index=True)
    return first, here[first].astype(np.int64), there[first].astype(np.int64)


def _at(grid: F32 | None, rows: Numbers, cols: Numbers) -> F32:
    if grid is None:
        return np.zeros((len(rows), len(cols)), np.float32)
    if grid.shape == (len(rows), len(cols)) and _in_order(rows) and _in_order(cols):
        return grid  # nearly always, and indexing costs more than comparing
    chosen: F32 = grid[np.ix_(rows, cols)]
    return chosen


def _in_order(numbers: Numbers) -> bool:
    return np.array_equal(numbers, np.arange(len(numbers)))
