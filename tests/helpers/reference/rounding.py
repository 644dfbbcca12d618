"""Roundings that integer formats share (SPEC 3.1 and 3.3), in float32 throughout.

The reference implementation runs with flush-to-zero and denormals-are-zero.  NumPy
does not, so every place where that shows is written out with `ftz`.
"""

from __future__ import annotations

import numpy as np

from ktconv.formats.integers import ftz
from ktconv.system.arrays import F32, I32


def row_amax(matrix: F32) -> F32:
    """max_k |x[n, k]| of a finite [N, K] matrix, as [N] (SPEC 3.1).

    NaN and Inf are refused: what the reference makes of them (SPEC 3.5) depends on
    the order of its vector lanes and no sound checkpoint has them.
    """
    if matrix.dtype != np.float32 or matrix.ndim != 2:
        raise TypeError(f"expected a 2-D float32 matrix, got {matrix.ndim}-D {matrix.dtype}")
    if not np.isfinite(matrix).all():
        raise ValueError("the matrix contains NaN or Inf")
    amax: F32 = np.abs(matrix).max(axis=1, initial=np.float32(0))
    return amax


def reciprocal(scale: F32) -> F32:
    """fl32(1 / d), and +0 for d = 0; [N] to [N]."""
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=scale != 0)
    return inverse


def first_rounding(matrix: F32, scale: F32) -> I32:
    """q = RNE(fl32(ftz(x) * fl32(1/d))), saturated to a signed byte (SPEC 3.3).

    matrix is [N, K], scale [N]; two float32 roundings before the one to integer.
    """
    y = ftz(matrix) * reciprocal(scale)[:, None]
    q: I32 = np.clip(np.rint(y), -128, 127).astype(np.int32)
    return q
