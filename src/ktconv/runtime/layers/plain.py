"""Codes and scales of stored matrices in the plain form of ktconv.h, unchanged in value."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv import native
from ktconv.errors import CheckpointError
from ktconv.formats import Format, Slice
from ktconv.runtime.layers.ggml_blocks import CODED_BLOCKS, COLS, CodedBlock
from ktconv.runtime.layers.native_formats import scale_block
from ktconv.source import BlockGrid
from ktconv.source.elements import BF16, F4_E0M3, F4_E2M1, F6_E2M3, F8_E4M3, I4, I8, STREAMS, U4
from ktconv.source.reading.matrices import MatrixReader, Scales
from ktconv.system.arrays import F32, U8, Array

# Where stored bytes are plain codes, by kt_format and element: what they are XORed with. Integers
# only where their zero points are `integer_zero`.
_STORED = {
    ("bf16", BF16.name): 0,
    ("fp8", F8_E4M3.name): 0,
    ("mxfp8", F8_E4M3.name): 0,
    ("mxfp4", F4_E2M1.name): 0,
    ("nvfp4", F4_E2M1.name): 0,
    ("gint4", U4.name): 0,
    ("gint4", I4.name): 0x88,  # two's complement
    ("int8", I8.name): 0,
    ("gint8", STREAMS[8].name): 0,
    ("gint8", I8.name): 0x80,
}
# The smallest code without a sign that is not finite.
_INFINITE = {"bf16": 0x7F80, "fp8": 0x7F, "mxfp8": 0x7F}
# Numbers that codes stand for; integers are below 128.
_LARGEST = {"fp8": 448, "mxfp8": 448, "mxfp4": 6, "nvfp4": 6 * 448}
# Numbers are multiples of it; else of 1.
_STEPS = {F4_E0M3.name: np.float32(0.25), F6_E2M3.name: np.float32(0.125)}


class NotExactError(CheckpointError):
    """A format does not hold the numbers of a matrix, whose encoding it may hold."""


class PlainReader(Struct, frozen=True):
    """Plain codes and scales for `format`, of parts of a matrix.

    `scales`: what `source.load_scales` returned. Both methods raise NotExactError for a number that
    the format does not have, CheckpointError for a NaN or an infinity.
    """

    format: Format
    source: MatrixReader
    scales: Scales | None

    def codes(self, chunk: range, data: U8, part: Slice) -> Array:
        """Codes of the columns of `part` in the rows that `source.read` left in `data`."""
        if block := self._block:
            return block.plain_codes(self._blocks(chunk, data, part))
        if self.format.code == "bf16" and self.scales is not None:
            return self._multiplied(chunk, data, part)
        mask = self._stored_mask()
        if mask is None:
            return self._decoded(chunk, data, part)
        codes = self._stored(chunk, data, part).view(self.format.layout.code_array)
        if mask:
            codes = codes ^ codes.dtype.type(mask)
        if codes.dtype == np.int8 and codes.min() < self._levels[0]:
            raise self._beyond(float(codes.min()))
        self._expect_finite(codes, chunk, part)
        return codes

    def scale(self, chunk: range, data: U8, part: Slice) -> Array | None:
        """Scales of the same elements."""
        tensor, grid = self.source.matrix.tensor, self.source.matrix.scale
        if block := self._block:
            values = block.scales(self._blocks(chunk, data, part))
        elif grid is None or self.scales is None or self.format.scale_dtype == "none":
            return None
        else:
            tensor, values = grid.tensor, self._of_grid(grid, self.scales, chunk, part)
        stored = np.ascontiguousarray(self._as_stored(values, tensor.name))
        return stored.reshape(self.format.layout.scale_shape(len(chunk), part.shape[1]))

    def _of_grid(self, grid: BlockGrid, scales: Scales, chunk: range, part: Slice) -> F32:
        """Scales of the format's blocks."""
        if scales.group_of_col is not None:
            raise self._not_exact("has inputs of a group that are not neighbours (g_idx)")
        height, width = scale_block(self.format, part.shape[1])
        own = range(part.col_start, part.col_stop)
        rows = _places(chunk, height, grid.block_rows, grid.row_origin)
        cols = _places(own, width, grid.block_cols, grid.col_origin)
        values: F32 = scales.scale[rows][:, cols]
        step = _STEPS.get(self.source.matrix.element.name)
        return values if step is None else values * step

    # ---- blocks of ggml ----

    @property
    def _block(self) -> CodedBlock | None:
        return CODED_BLOCKS.get(self.source.matrix.element.name)

    def _blocks(self, chunk: range, data: U8, part: Slice) -> U8:
        """[rows, cols / 32, bytes] of the columns."""
        matrix, size = self.source.matrix, self.source.matrix.element.unit_bytes
        rows = data[: matrix.nbytes(len(chunk))].reshape(len(chunk), -1, size)
        return rows[:, part.col_start // COLS : part.col_stop // COLS]

    # ---- codes ----

    def _stored_mask(self) -> int | None:
        unit = self.source.matrix.element
        mask = _STORED.get((self.format.code, unit.name))
        if unit.integer_zero is None or mask is None:
            return mask
        assert self.scales is not None, "integers have scales"
        zero = self.scales.zero_point
        found = unit.integer_zero == 0 if zero is None else (zero == unit.integer_zero).all()
        return mask if found else None

    def _stored(self, chunk: range, data: U8, part: Slice) -> U8:
        """The bytes of the columns, row by row; weights stored [in, out] are transposed."""
        matrix, unit = self.source.matrix, self.source.matrix.element
        units = data[: matrix.nbytes(len(chunk))].view(f"V{unit.unit_bytes}")
        if matrix.col_stride == 1:
            rows = units.reshape(len(chunk), -1)
        else:
            # As numbers: NumPy copies units without a type one by one.
            rows = units.view(f"u{unit.unit_bytes}").reshape(-1, len(chunk)).T
        cols = slice(part.col_start // unit.unit_cols, part.col_stop // unit.unit_cols)
        return np.ascontiguousarray(rows[:, cols]).view(np.uint8)

    def _decoded(self, chunk: range, data: U8, part: Slice) -> Array:
        """Integers by the C library's decoder, under scales of 1."""
        scales, (start, cols) = self.scales, (part.col_start, part.shape[1])
        assert scales is not None, "integers have scales"
        if scales.zero_point is not None and (scales.zero_point % 1).any():
            raise self._not_exact("has zero points that are not integers")
        ones = replace(scales, scale=np.ones_like(scales.scale), row_scale=None)
        values = native.decode(self.source.view(chunk, ones, data, start, cols))
        step = _STEPS.get(self.source.matrix.element.name)
        numbers = values if step is None else values / step
        least, most = self._levels
        for number in float(numbers.min()), float(numbers.max()):
            if not least <= number <= most:
                raise self._beyond(number)
        return self.format.layout.plain_codes(numbers.astype(np.int8))

    def _multiplied(self, chunk: range, data: U8, part: Slice) -> Array:
        """Codes times their scales, as bf16."""
        view = self.source.view(chunk, self.scales, data, part.col_start, part.shape[1])
        bits = native.decode(view).view(np.uint32)
        codes: Array = (bits >> np.uint32(16)).astype(np.uint16)
        self._expect_finite(codes, chunk, part)
        if (bits & np.uint32(0xFFFF)).any():
            raise self._not_exact("has a number that bf16 does not have")
        return codes

    def _expect_finite(self, codes: Array, chunk: range, part: Slice) -> None:
        if self.format.code not in _INFINITE:
            return
        least = codes.dtype.type(_INFINITE[self.format.code])
        magnitudes = codes & codes.dtype.type(np.iinfo(codes.dtype).max >> 1)
        if magnitudes.max() >= least:
            row, col = (int(i) for i in np.argwhere(magnitudes >= least)[0])
            raise self.source.not_finite(chunk.start + row, part.col_start + col)

    @property
    def _levels(self) -> tuple[int, int]:
        traits = self.format.traits
        return -traits.max_level - bool(traits.code_bias), traits.max_level

    # ---- scales ----

    def _as_stored(self, values: F32, name: str) -> Array:
        """Scales of tensor `name` as the format stores them."""
        largest = np.float32(_LARGEST.get(self.format.code, 128))
        with np.errstate(over="ignore"):
            extreme = max(values.max(), values.min(), key=abs)  # also a NaN
            infinite = not np.isfinite(extreme * largest)
        if infinite:
            raise CheckpointError(
                f"{name} has the scale {extreme:.9g}, under which weights are beyond float32",
                "The checkpoint is damaged; download it again.",
            )
        stored, back = _stored_scales(self.format, values)
        wrong = back != values
        if wrong.any():
            raise NotExactError(
                f"{name} has the scale {values[wrong][0]:.9g}, which is not a number in "
                f"{self.format.scale_dtype}, as {self.format.key} needs it"
            )
        return stored

    def _beyond(self, number: float) -> NotExactError:
        least, most = self._levels
        return self._not_exact(
            f"has the number {number:g}, but {self.format.key} has {least} to {most}"
        )

    def _not_exact(self, what: str) -> NotExactError:
        return NotExactError(f"{self.source.matrix.tensor.name} {what}")


def _places(elements: range, step: int, block: int, origin: int) -> slice | Array:
    """Along an axis of a grid that was loaded for a matrix: the place of each `step` elements'
    block, where element 0 is number `origin` of those that the grid counts."""
    first = origin % block + elements.start
    if step == block:
        return slice(first // block, first // block + -(-len(elements) // step))
    found: Array = (first + np.arange(0, len(elements), step)) // block
    return found


def _stored_scales(fmt: Format, values: F32) -> tuple[Array, F32]:
    """Scales in the dtype of `fmt`, and the values that these stand for: steps between codes."""
    if fmt.scale_dtype == "f32":
        units = np.float32(fmt.traits.scale_units)
        stored = values / units
        return stored, stored * units
    bits = values.view(np.uint32)
    if fmt.scale_dtype == "bf16":
        kept = bits & np.uint32(0xFFFF0000)
        return (kept >> np.uint32(16)).astype(np.uint16), kept.view(np.float32)
    # 2^(code - 127); code 0 is a float32 with no exponent and the upper bit of the mantissa.
    codes = bits >> np.uint32(23)
    powers = np.where(codes == 0, np.uint32(1 << 22), codes << np.uint32(23))
    return codes.astype(np.uint8), powers.view(np.float32)
