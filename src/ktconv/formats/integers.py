"""INT4, INT8 and their group formats: steps and values of codes (SPEC 3, 8.4 and 8.5)."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, Array

from .groups import unpacked_nibbles
from .scales import values
from .table import SMALLEST_NORMAL, Format

RECIPROCAL_OF_127 = np.float32(1) / np.float32(127)  # 0x3C010204 = (1 - 2^-28) / 127


def ftz(values: F32) -> F32:
    """Denormals of either sign replaced by +0; any shape."""
    flushed: F32 = np.where(np.abs(values) < SMALLEST_NORMAL, np.float32(0), values)
    return flushed


def scale_of(fmt: Format, amax: F32) -> F32:
    """d of largest magnitudes, before it is rounded to the dtype of scales; any shape (SPEC 3.2).

    With 127 levels ftz(fl32(ftz(amax) * fl32(1/127))), which is not a division by 127; else
    ftz(fl32(fl64(amax / 112))) for INT4, and of groups the same by 7.
    """
    traits = fmt.traits
    if traits.bits == 8:
        return ftz(ftz(amax) * RECIPROCAL_OF_127)
    levels = traits.max_level * traits.scale_units
    return ftz((amax.astype(np.float64) / levels).astype(np.float32))


def dequantize(fmt: Format, codes: Array, scale: Array) -> F32:
    """fl32(code * step), float32 [N, K]; the step is d, or 16 d for INT4, which is exact. Codes of
    groups are stored with `code_bias` added, those of 4 bits as nibbles."""
    if not fmt.group:
        step: F32 = np.float32(fmt.traits.scale_units) * scale
        return codes.astype(np.float32) * step[:, None]
    stored = unpacked_nibbles(codes) if fmt.traits.bits == 4 else codes
    levels = stored.astype(np.float32) - np.float32(fmt.traits.code_bias)
    restored: F32 = levels * np.repeat(values(fmt, scale), fmt.group, axis=1)
    return restored
