"""Plain codes and scales of NVFP4: E4M3 scales that lie among the codes, and one of the matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktconv.formats import Format, Slice, nvfp4
from ktconv.formats.decode import E4M3FN_VALUES
from ktconv.runtime.layers.plain import PlainReader
from ktconv.source.reading.matrices import MatrixReader, Scales
from ktconv.system.arrays import U8, Array

_E4M3 = E4M3FN_VALUES[:127]  # those that are not negative


@dataclass(frozen=True, slots=True)
class InnerScaleReader(PlainReader):
    """A row's scale is the second level, which all of a matrix share: where the source divides by
    it, the reciprocal, rounded to float32."""

    factor: float  # `scales` are those of groups alone

    def codes(self, chunk: range, data: U8, part: Slice) -> Array:
        nibbles = PlainReader.codes(self, chunk, data, part)
        grid, scales = self.source.matrix.scale, self.scales
        assert grid is not None and scales is not None
        inner = self._of_grid(grid, scales, chunk, part)
        return nvfp4.plain(nibbles, np.searchsorted(_E4M3, inner).astype(np.uint8))

    def scale(self, chunk: range, data: U8, part: Slice) -> Array | None:
        grid = self.source.matrix.scale
        assert grid is not None
        values = np.full(len(chunk), self.factor, np.float32)
        return self._as_stored(values, (grid.outer or grid).tensor.name)


def plain_reader(fmt: Format, source: MatrixReader) -> PlainReader:
    """A reader of a matrix in the plain form of `fmt`."""
    if not fmt.traits.inner_scales:
        return PlainReader(fmt, source, source.load_scales())
    grid = source.matrix.scale
    if grid is None or grid.outer is None:
        return InnerScaleReader(fmt, source, source.load_scales(), 1.0)
    blocks, factor, divides = source.load_levels()
    factor = float(np.float32(1 / factor)) if divides else factor
    return InnerScaleReader(fmt, source, Scales(blocks), factor)
