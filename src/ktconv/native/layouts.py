"""How weights lie in memory: layouts, their sizes, and the arrays that codes and scales are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, expect_rows


def _names(enum: str, prefix: str) -> dict[str, int]:
    """Constants of a C enum by their names without the prefix, in lower case."""
    constants: dict[str, int] = ffi.typeof(enum).relements
    return {name.removeprefix(prefix).lower(): value for name, value in constants.items()}


FORMATS = _names("kt_format", "KT_FORMAT_")
SCALE_DTYPES = _names("kt_scale_dtype", "KT_SCALE_")
_SCALE_ARRAYS: dict[str, type[np.generic]] = {
    "none": np.uint8,
    "f32": np.float32,
    "bf16": np.uint16,
    "ue8m0": np.uint8,
}
_CODE_ARRAYS: dict[str, type[np.generic]] = {"int8": np.int8, "int4": np.int8, "bf16": np.uint16}
_NIBBLES = ("mxfp4", "gint4")  # two codes in a byte
_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Layout:
    """A format, the columns that share a scale, and the dtype of scales; see kt_layout."""

    format: str
    group: int = 0
    scale_dtype: str = "f32"

    def c(self) -> Any:
        return ffi.new(
            "kt_layout *",
            (FORMATS[self.format], self.group, SCALE_DTYPES[self.scale_dtype]),
        )

    def weight_size(self, rows: int, cols: int) -> int:
        """Bytes of packed codes; 0 if the layout cannot hold that shape."""
        return int(lib.kt_packed_size(self.c(), rows, cols))

    def scale_size(self, rows: int, cols: int) -> int:
        """Bytes of packed scales."""
        return int(lib.kt_scale_size(self.c(), rows, cols))

    def multiplies(self, rows: int, cols: int) -> bool:
        """Whether the kernels multiply with matrices of this shape."""
        return bool(lib.kt_product_check(self.c(), rows, cols) == lib.KT_OK)

    # ---- plain codes and scales, as checkpoints store them ----

    @property
    def code_array(self) -> np.dtype[Any]:
        return np.dtype(_CODE_ARRAYS.get(self.format, np.uint8))

    @property
    def codes_per_element(self) -> int:
        return 2 if self.format in _NIBBLES else 1

    def code_shape(self, rows: int, cols: int) -> tuple[int, int]:
        return rows, cols // self.codes_per_element

    @property
    def scale_array(self) -> np.dtype[Any]:
        return np.dtype(_SCALE_ARRAYS[self.scale_dtype])

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        if not self.group:
            return (0,) if self.scale_dtype == "none" else (rows,)
        return -(-rows // _FP8_BLOCK) if self.format == "fp8" else rows, cols // self.group

    def traits(self) -> dict[str, int]:
        """What follows from the layout, by the names of struct kt_layout_traits."""
        found = ffi.new("kt_layout_traits *")
        if lib.kt_layout_describe(self.c(), found) != lib.KT_OK:
            raise ValueError(f"{self} does not exist")
        return {name: getattr(found, name) for name, _ in ffi.typeof("kt_layout_traits").fields}


def layout_of(layout: Layout | str) -> Layout:
    """A layout, or that of a format with one float32 scale per row, by its name."""
    if isinstance(layout, Layout):
        return layout
    if layout not in FORMATS:
        raise KeyError(layout)
    return Layout(layout)


def packed_size(layout: Layout | str, rows: int, cols: int) -> int:
    """Bytes of packed codes; ValueError if the layout cannot hold the shape."""
    layout = layout_of(layout)
    size = layout.weight_size(rows, cols)
    if not size:
        raise ValueError(f"{layout.format} cannot hold a matrix of [{rows}, {cols}]")
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
