"""Sums in the encoding that the source has: FP8 codes, and scales that are chosen again.

The scale of a block is by the rule of `kt_encode` (docs/formats.md, 10): its largest magnitude over
448; of powers of two that of MXFP8, with which no weight is beyond 448, also where config.json
says that scales in another dtype are powers of two: kernels then read their exponents alone.
Scales in bf16 and binary16 are rounded up, for the same reason. Codes are the nearest to
weight / scale.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ktconv.formats.decode import E8M0_VALUES, bf16_to_f32
from ktconv.formats.fp8 import LARGEST, nearest
from ktconv.source.elements import F8_E4M3
from ktconv.source.types import ExpertMatrix, TensorRef
from ktconv.system.arrays import F32, U8

_DTYPES = {"F32": "F32", "BF16": "BF16", "F16": "F16", "E8M0": "U8"}


class EncodedSums(Struct):
    """The codes and scales of a matrix with sums."""

    scale: TensorRef  # of the source
    number: str  # what its numbers are
    block: tuple[int, int]
    shape: tuple[int, int]  # of the scales
    powers: bool  # scales are powers of two
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _found: tuple[U8, F32] | None = None

    def scales(self, pieces: Callable[[], Iterable[tuple[range, F32]]]) -> tuple[U8, F32]:
        """The bytes of all scales and their values [rows, cols] of blocks. `pieces`: rows of sums,
        one after the other; asked for once."""
        with self._lock:
            if self._found is None:
                largest = np.zeros(self.shape, np.float32)
                for rows, sums in pieces():
                    self._add(largest, rows, np.abs(sums))
                if self.powers:
                    least = np.maximum(largest, np.float32(1e-30))
                    largest = np.ldexp(np.float32(LARGEST), _exponents(least))
                self._found = _scales(self.number, largest)
            return self._found

    def _add(self, largest: F32, rows: range, sizes: F32) -> None:
        high, wide = self.block
        cols = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[1], wide), axis=1)
        own = np.arange(rows.start, rows.stop) // high
        firsts = np.flatnonzero(np.diff(own, prepend=-1))
        found = np.maximum.reduceat(cols, firsts, axis=0)
        largest[own[firsts]] = np.maximum(largest[own[firsts]], found)

    def codes(self, rows: range, sums: F32, scales: F32) -> U8:
        """Codes of some rows of sums."""
        high, wide = self.block
        own = scales[np.arange(rows.start, rows.stop) // high]
        spread = np.repeat(own, wide, axis=1)[:, : sums.shape[1]]
        sizes = np.minimum(np.abs(sums) / spread, np.float32(LARGEST))
        found: U8 = (nearest(sizes) | (np.signbit(sums) << 7)).astype(np.uint8)
        return found


def encoded_sums(matrix: ExpertMatrix, powers: bool) -> EncodedSums | None:
    """None where codes of another kind, or in another order, would be wanted. `powers`: whether
    config.json says that scales are powers of two."""
    rule = matrix.quantization
    if matrix.element is not F8_E4M3 or rule is None:
        return None
    grid = rule.scale
    shape = -(-matrix.rows // grid.block_rows), -(-matrix.cols // grid.block_cols)
    plain = (
        rule.zero_point is None
        and rule.groups is None
        and rule.declared is None
        and grid.outer is None
        and (matrix.start, matrix.col_stride, matrix.row_stride) == (0, 1, matrix.cols)
        and (grid.start, grid.row_origin, grid.col_origin) == (0, 0, 0)
        and (shape[1] == 1 or grid.col_stride == 1)
        and (shape[0] == 1 or grid.row_stride == shape[1])
        and math.prod(grid.tensor.shape) == math.prod(shape)
        and grid.number in _DTYPES
    )
    block = grid.block_rows, grid.block_cols
    return EncodedSums(grid.tensor, grid.number, block, shape, powers) if plain else None


def _exponents(largest: F32) -> NDArray[np.int32]:
    """Exponents of scales that are powers of two, of blocks with these magnitudes above 0."""
    part, power = np.frexp(largest)
    found: NDArray[np.int32] = power - 9 + (part >= 0.875)
    return found


def _scales(number: str, largest: F32) -> tuple[U8, F32]:
    """Scales of blocks with these largest magnitudes: bytes, and values in their shape."""
    if number == "E8M0":
        exponent = np.where(largest > 0, _exponents(largest), -127)
        codes = np.clip(exponent + 127, 0, 254).astype(np.uint8)
        return codes.reshape(-1), E8M0_VALUES[codes]
    scale = (np.maximum(largest, np.float32(1e-30)) / np.float32(LARGEST)).astype(np.float32)
    if number == "BF16":
        bits = ((scale.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
        return bits.reshape(-1).view(np.uint8), bf16_to_f32(bits)
    if number == "F16":
        half = scale.astype(np.float16)
        half = np.where(half < scale, np.nextafter(half, np.float16(np.inf)), half)
        return half.reshape(-1).view(np.uint8), half.astype(np.float32)
    return scale.reshape(-1).view(np.uint8), scale
