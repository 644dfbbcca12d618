"""Source encodings to float32, from their definitions (SPEC 6); any shape unless noted."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8, U16


def bf16_to_f32(bits: U16) -> F32:
    """Exact: a bf16 is the upper half of a float32."""
    values: F32 = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def f16_to_f32(bits: U16) -> F32:
    """Exact: every binary16, denormals included, is a normal float32 or zero."""
    return bits.view(np.float16).astype(np.float32)


def f32_to_bf16(values: F32) -> U16:
    """Bit patterns nearest to `values`, ties to even.

    Finite values from 2^128 (1 - 2^-9) on become Inf, as IEEE 754 rounds; NaN stays
    NaN (quiet, upper payload kept).
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    halves: U16 = np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
    return halves


def round_to_bf16(values: F32) -> F32:
    """float32 values rounded to bf16, as `--compat` does first."""
    return bf16_to_f32(f32_to_bf16(values))


def rounded(values: F32, dtype: str) -> F32:
    """float32 values rounded to numbers of BF16 or F16; as they are for other dtypes."""
    if dtype == "BF16":
        return round_to_bf16(values)
    return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values


def _e4m3fn(code: int) -> float:
    """One E4M3FN byte: sign, 4 exponent bits with bias 7, 3 mantissa bits, no Inf."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3FN_VALUES: F32 = np.array([_e4m3fn(code) for code in range(256)], np.float32)


def e4m3fn_to_f32(codes: U8) -> F32:
    """Exact; 0x7F and 0xFF are NaN."""
    return E4M3FN_VALUES[codes]


E8M0_VALUES: F32 = np.array(
    [2.0 ** (code - 127) for code in range(255)] + [float("nan")], np.float32
)


def e8m0_to_f32(codes: U8) -> F32:
    """2^(s - 127), exact (s = 0 is the denormal 2^-127); 255 is NaN."""
    return E8M0_VALUES[codes]
