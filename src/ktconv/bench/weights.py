"""Random experts that cost little to make, each determined by seed and index."""

from __future__ import annotations

import numpy as np

from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.runtime.layers.experts import GatedMatrices, Matrices
from ktconv.system.arrays import F32

_BLOCK = 1 << 20  # numbers drawn; all matrices are cut from them
_STEP = 7919  # numbers between the starts of two matrices, a prime


class RandomWeights:
    """Gaussian matrices of standard deviation 1 / sqrt(columns), rounded to bf16.

    Expert e's matrix p starts at another place of one repeated block of numbers, so that experts
    differ and making one costs nothing: it is a view.
    """

    def __init__(self, seed: int, hidden: int, intermediate: int) -> None:
        self.hidden, self.intermediate = hidden, intermediate
        drawn = np.random.default_rng(seed).standard_normal(_BLOCK, np.float32)
        repeats = -(-hidden * intermediate // _BLOCK) + 1
        self._numbers = {
            cols: np.tile(bf16_to_f32(f32_to_bf16(drawn * np.float32(cols**-0.5))), repeats)
            for cols in {hidden, intermediate}
        }
        for numbers in self._numbers.values():
            numbers.flags.writeable = False

    def expert(self, index: int) -> GatedMatrices:
        """gate [I, H], up [I, H], down [H, I] of one expert."""
        shapes = [(self.intermediate, self.hidden)] * 2 + [(self.hidden, self.intermediate)]
        gate, up, down = (
            self._matrix(3 * index + which, *shape) for which, shape in enumerate(shapes)
        )
        return gate, up, down

    def ungated(self, index: int) -> Matrices:
        """Matrices of an expert without gate."""
        return None, *self.expert(index)[1:]

    def _matrix(self, number: int, rows: int, cols: int) -> F32:
        start = number * _STEP % _BLOCK
        return self._numbers[cols][start : start + rows * cols].reshape(rows, cols)
