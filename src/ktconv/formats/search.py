"""Bounds of the scale that a search finds for a row or group (SPEC 3.6 and 3.8).

The searches are the C library's: `native/src/quantize/search.h` and `fixed.h`.
"""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32

from .decode import bf16_to_f32, f32_to_bf16
from .integers import ftz
from .table import Format

# The scales among which compensated codes choose, as multiples of the searched one: compensation
# moves weights, so that another scale is best for a row (docs/calibration.md has what this gains).
# The first of equally good ones is taken.
MULTIPLES = (1.0, 0.85, 0.92, 1.08, 1.15)
# Candidate scales, in 420ths of the first; then come steps by least squares.
_LEAST, _MOST, _STEPS = 420 - 13 * 21, 446, 2
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # of the largest weight in a row that is searched


def possible_scales(fmt: Format, amax: F32, first: F32) -> tuple[F32, F32]:
    """The smallest and the largest scale that a search can find with any importance, of rows with
    these largest weights, which make the scales `first`; any shape.

    The largest candidate is 446 / 420 of the first; the search ends with two least-squares steps.
    Such a step size is a weighted mean of |w| / |c|, where |w| is at most |c| + 1/2 steps of the
    size before; or |c| is the last level, and |w| / |c| at most `first`. So it is never more than
    1.5 times as large as the largest before. Sums in binary32 add less than 2^-16 of that, scales
    in bf16 less than 2^-7.
    """
    least = storable(fmt, first * np.float32(_LEAST / 420))
    more = 1 + (2.0**-7 if fmt.scale_dtype == "bf16" else 2.0**-16)
    largest = first.astype(np.float64) * _MOST / 420
    most = (largest * 1.5**_STEPS * more).astype(np.float32)
    usual = (amax >= _SMALLEST) & (amax <= _LARGEST)
    return np.where(usual, least, first), np.where(usual, storable(fmt, most), first)


def storable(fmt: Format, scale: F32) -> F32:
    """Scales as the format stores them; denormals become 0."""
    scale = ftz(scale)
    if fmt.scale_dtype == "bf16":
        rounded: F32 = bf16_to_f32(f32_to_bf16(scale))
        return rounded
    return scale
