"""The truth that faster code is compared with: quantize, pack and back, by format."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from . import int4, int8
from .kt_layout import pack_codes, unpack_codes
from .rounding import F32
from .table import Format

_ROUNDINGS: dict[str, ModuleType] = {"int4": int4, "int8": int8}


def quantize(fmt: Format, matrix: F32) -> tuple[NDArray[np.int8], F32]:
    """Codes int8 [N, K] and scales float32 [N] of a finite float32 [N, K] matrix (SPEC 3)."""
    codes: NDArray[np.int8]
    scale: F32
    codes, scale = _ROUNDINGS[fmt.key].quantize(matrix)
    return codes, scale


def dequantize(fmt: Format, codes: NDArray[np.int8], scale: F32) -> F32:
    """Weights float32 [N, K] that the codes int8 [N, K] and scales [N] stand for."""
    weights: F32 = _ROUNDINGS[fmt.key].dequantize(codes, scale)
    return weights


def quantize_pack(fmt: Format, matrix: F32) -> tuple[NDArray[np.uint8], F32]:
    """Payload uint8 [weight_nbytes] and scales float32 [N] of one part's matrix.

    For a backward matrix pass the transpose of the forward slice.
    """
    codes, scale = quantize(fmt, matrix)
    return pack_codes(fmt, codes), scale


def unpack(fmt: Format, packed: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.int8]:
    """Codes int8 [rows, cols] of a payload."""
    return unpack_codes(fmt, packed, rows, cols)
