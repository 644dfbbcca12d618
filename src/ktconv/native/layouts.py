"""Layouts of weights in memory: sizes, and dtypes and shapes of codes and scales."""

from __future__ import annotations

from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, expect_rows


def _names(enum: str, prefix: str) -> dict[str, int]:
    """Constants of a C enum by their names without the prefix, in lower case."""
    constants: dict[str, int] = ffi.typeof(enum).relements
    return {name.removeprefix(prefix).lower(): value for name, value in constants.items()}


FORMATS = _names("kt_format", "KT_FORMAT_")
SCALE_DTYPES = _names("kt_scale_dtype", "KT_SCALE_")
INNER_COLS = 32  # columns that `inner_scales` belong to
_STRIP = 32  # rows whose scales are neighbours where a row has several
_SCALE_ARRAYS: dict[int, type[np.generic]] = {4: np.float32, 2: np.uint16}  # else uint8


class Traits(NamedTuple):
    """struct kt_layout_traits; ktconv.h explains the fields."""

    bits: int
    plain_bits: int
    inner_scales: int
    code_bias: int
    row_multiple: int
    col_multiple: int
    scale_size: int
    scale_rows: int
    max_level: int
    scale_units: int


class Layout(Struct, frozen=True, cache_hash=True, dict=True):
    """A format, the columns that share a scale (0: all of a row), and the dtype of scales; see
    kt_layout."""

    format: str
    group: int = 0
    scale_dtype: str = "f32"

    def c(self) -> Any:
        """struct kt_layout; the same one at every call, not to be changed."""
        return _struct(self)

    @cached_property
    def traits(self) -> Traits:
        """Traits that follow from the layout. ValueError for one that does not exist."""
        found = ffi.new("kt_layout_traits *")
        if lib.kt_layout_describe(self.c(), found) != lib.KT_OK:
            raise ValueError(f"{self} does not exist")
        return Traits(*(getattr(found, name) for name in Traits._fields))

    def weight_size(self, rows: int, cols: int) -> int:
        """Bytes of packed codes; 0 for a shape that the layout does not allow."""
        return _packed_size(self, rows, cols)

    def scale_size(self, rows: int, cols: int) -> int:
        """Bytes of packed scales; 0 also where the layout has none."""
        return _scale_size(self, rows, cols)

    def multiplies(self, rows: int, cols: int) -> bool:
        """Whether the kernels multiply with matrices of this shape."""
        return bool(lib.kt_product_check(self.c(), rows, cols) == lib.KT_OK)

    # ---- plain codes and scales, as checkpoints store them ----

    @cached_property
    def code_array(self) -> np.dtype[Any]:
        traits = self.traits
        if traits.plain_bits == 16:
            return np.dtype(np.uint16)
        signed = traits.plain_bits == 8 and traits.max_level > 0 and not traits.code_bias
        return np.dtype(np.int8 if signed else np.uint8)

    @property
    def codes_per_element(self) -> int:
        """Codes in an element of the array of plain codes."""
        return 2 if self.traits.plain_bits == 4 else 1

    def plain_codes(self, codes: Array) -> Array:
        """int8 codes [rows, cols] as plain ones, of a layout with a quantizer."""
        bias = np.uint8(self.traits.code_bias)
        stored = codes.view(np.uint8) + bias if bias else codes
        if self.codes_per_element == 1:
            return stored
        nibbles: Array = stored[:, ::2] | stored[:, 1::2] << np.uint8(4)
        return nibbles

    def code_shape(self, rows: int, cols: int) -> tuple[int, int]:
        inner = cols // INNER_COLS * self.traits.inner_scales
        return rows, cols // self.codes_per_element + inner

    def cols_of(self, width: int) -> int:
        """Columns of a matrix whose array of plain codes has that many."""
        inner = self.traits.inner_scales
        return width * INNER_COLS // (INNER_COLS // self.codes_per_element + inner)

    @cached_property
    def scale_array(self) -> np.dtype[Any]:
        return np.dtype(_SCALE_ARRAYS.get(self.traits.scale_size, np.uint8))

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        if not self.group:
            return (0,) if self.scale_dtype == "none" else (rows,)
        return -(-rows // self.traits.scale_rows), cols // self.group

    def packed_scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """[rows]; [rows / 32, groups, 32]; or [rows / 32, groups] where the rows of a strip have
        one scale."""
        if not self.group:
            return (rows,)
        shape = rows // _STRIP, cols // self.group
        return shape if self.traits.scale_rows > 1 else (*shape, _STRIP)


# What follows from a layout is asked at every call of a packer, which may take 100 us itself.


@cache
def _struct(layout: Layout) -> Any:
    values = FORMATS[layout.format], layout.group, SCALE_DTYPES[layout.scale_dtype]
    return ffi.new("kt_layout *", values)


@lru_cache(1000)
def _packed_size(layout: Layout, rows: int, cols: int) -> int:
    return int(lib.kt_packed_size(layout.c(), rows, cols))


@lru_cache(1000)
def _scale_size(layout: Layout, rows: int, cols: int) -> int:
    return int(lib.kt_scale_size(layout.c(), rows, cols))


def layout_of(layout: Layout | str) -> Layout:
    """A layout, or that of a format with one float32 scale per row, by its name."""
    if isinstance(layout, Layout):
        return layout
    if layout not in FORMATS:
        raise KeyError(layout)
    return Layout(layout)


def packed_size(layout: Layout | str, rows: int, cols: int) -> int:
    """Bytes of packed codes; ValueError for a shape that the layout does not allow."""
    layout = layout_of(layout)
    size = layout.weight_size(rows, cols)
    if not size:
        raise ValueError(f"{layout.format} does not allow a matrix of [{rows}, {cols}]")
    return size


def expect_codes(layout: Layout, rows: int, cols: int, codes: Array) -> None:
    expect_rows("codes", codes, layout.code_array, layout.code_shape(rows, cols))


def expect_scale(layout: Layout, rows: int, cols: int, scale: Array | None) -> None:
    if layout.scale_dtype == "none":
        if scale is not None:
            raise ValueError(f"{layout.format} has no scales")
        return
    if scale is None:
        raise ValueError(f"{layout.format} needs scales")
    expect_rows("scale", scale, layout.scale_array, layout.scale_shape(rows, cols))


def stored_scale(layout: Layout, scale: Array) -> Array:
    """float32 scales >= 0, any shape, as the layout stores them: denormals are 0, and where it has
    bf16 they are rounded to that, ties to even."""
    found: Array = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    if layout.scale_dtype != "bf16":
        return found
    bits = found.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    rounded: Array = bits.view(np.float32)
    return rounded
