"""Encoded matrices as the C library decodes them."""

from __future__ import annotations

import numpy as np

from ktconv import native
from ktconv.formats.decode import bf16_to_f32, e4m3fn_to_f32, e8m0_to_f32, f16_to_f32
from ktconv.system.arrays import F32, U8, Array
from ktconv.targets.encoded.scheme import Scheme

# Of the codes of a kind of number: dtype of the C library, and the code that means 0.
_ELEMENTS = {
    "int4": ("U4", 8),
    "int8": ("U8", 128),
    "fp8": ("F8_E4M3", None),
    "mxfp4": ("F4_E2M1", None),
    "mxfp8": ("F8_E4M3", None),
    "nvfp4": ("F4_E2M1", None),
    "bf16": ("BF16", None),
}


def tensor_scale(scheme: Scheme, factor: float) -> float:
    """kt_encode's, of the second scale as it is stored; 0 where there is none."""
    if scheme.row.kind != "nvfp4":
        return 0.0
    return factor if scheme.layout.divides else float(np.float32(1) / np.float32(factor))


def second_scale(scheme: Scheme, largest: float) -> float:
    """The second scale of a matrix with this largest magnitude, as it is stored: the largest scale
    of a block is then 448, the largest code 6."""
    if scheme.row.kind != "nvfp4":
        return 0.0
    if not 2688 / np.finfo(np.float32).max < largest:
        return 1.0
    whole, most = np.float32(448 * 6), np.float32(largest)
    return float(whole / most if scheme.layout.divides else most / whole)


def scale_values(scheme: Scheme, scales: Array, half: bool, factor: float = 0.0) -> F32:
    """Factors of codes, from scales as kt_encode leaves them."""
    kind = scheme.row.kind
    if scheme.row.is_int:
        bits = scales.view(np.uint16)
        return f16_to_f32(bits) if scheme.is_half(half) else bf16_to_f32(bits)
    if kind == "fp8":
        values: F32 = scales.view(np.float32)
        return values
    if kind != "nvfp4":
        return e8m0_to_f32(scales.view(np.uint8))
    both = e4m3fn_to_f32(scales.view(np.uint8))
    combine = np.divide if scheme.layout.divides else np.multiply
    found: F32 = combine(both, np.float32(factor))
    return found


def stored_matrix(
    scheme: Scheme,
    codes: U8,
    scales: Array,
    cols: int,
    half: bool,
    factor: float = 0.0,
    zeros: U8 | None = None,
) -> native.Matrix:
    """`codes` [rows, bytes], the first of which begins a block of `scales`; `zeros` [rows, groups]:
    the codes that mean 0, if they are not the usual ones."""
    codes = codes.reshape(len(codes), -1)
    element, zero = _ELEMENTS[scheme.row.kind]
    flat = np.ascontiguousarray(codes).reshape(-1)
    rows = len(codes)
    if not scheme.encodes:
        return native.Matrix(flat, element, rows, cols)
    _, _, unit_cols = native.stored_unit(element)
    width = -(-cols // unit_cols) * unit_cols  # of rows that fill their last word
    values = scale_values(scheme, scales, half, factor)
    grid = np.ascontiguousarray(values.reshape(-(-rows // scheme.row.block), -1))
    group = scheme.group_size if scheme.group_size > 0 else width
    return native.Matrix(
        flat,
        element,
        rows,
        cols,
        row_stride=width // unit_cols,
        block_scale=grid,
        block=(scheme.row.block, group),
        zero_point=_zero_points(grid, zero, zeros),
    )


def _zero_points(grid: F32, usual: int | None, zeros: U8 | None) -> F32 | None:
    if zeros is not None:
        return np.ascontiguousarray(zeros, np.float32).reshape(grid.shape)
    return None if usual is None else np.full_like(grid, usual)
