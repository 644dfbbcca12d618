"""Errors of kernels against float32 arithmetic."""

from __future__ import annotations

import numpy as np

from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.runtime import Pool
from ktconv.runtime.layers import Experts


def kernel_error(experts: Experts) -> float:
    """The error of a forward, relative to float32 arithmetic with activations rounded as kernels
    do."""
    rng = np.random.default_rng(4)
    x = f32_to_bf16(rng.standard_normal((5, experts.hidden), np.float32))
    ids = rng.integers(-1, experts.count, (5, 3))
    weights = rng.random(ids.shape, np.float32)
    with Pool(1) as pool:
        y = bf16_to_f32(experts.forward(x, ids, weights, pool))
    expected = experts.reference(x, ids, weights, rounded=True)
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
