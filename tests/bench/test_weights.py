"""Random experts are what they say: the same from the same seed, each its own, exact in bf16."""

from __future__ import annotations

import itertools

import numpy as np

from ktconv.bench.weights import RandomWeights
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16

HIDDEN, INTERMEDIATE = 256, 128


def test_same_seed_same_weights() -> None:
    first, second = (RandomWeights(7, HIDDEN, INTERMEDIATE).expert(3) for _ in range(2))
    other = RandomWeights(8, HIDDEN, INTERMEDIATE).expert(3)
    for one, two, three in zip(first, second, other, strict=True):
        np.testing.assert_array_equal(one, two)
        assert not np.array_equal(one, three)


def test_shapes_and_spread() -> None:
    gate, up, down = RandomWeights(1, HIDDEN, INTERMEDIATE).expert(0)
    assert gate.shape == up.shape == (INTERMEDIATE, HIDDEN)
    assert down.shape == (HIDDEN, INTERMEDIATE)
    for matrix in (gate, up, down):
        assert abs(matrix.std() * matrix.shape[1] ** 0.5 - 1) < 0.05
        assert abs(matrix.mean()) < 0.05 * matrix.std()


def test_bf16_holds_them() -> None:
    for matrix in RandomWeights(2, HIDDEN, INTERMEDIATE).expert(5):
        np.testing.assert_array_equal(bf16_to_f32(f32_to_bf16(matrix)), matrix)


def test_matrices_differ() -> None:
    source = RandomWeights(3, HIDDEN, INTERMEDIATE)
    matrices = [matrix.ravel() for expert in range(8) for matrix in source.expert(expert)]
    starts = {matrix[:64].tobytes() for matrix in matrices}
    assert len(starts) == len(matrices)
    for one, two in itertools.pairwise(matrices):
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.05


def test_experts_without_gate() -> None:
    source = RandomWeights(3, HIDDEN, INTERMEDIATE)
    gate, up, down = source.ungated(2)
    assert gate is None
    for one, two in zip((up, down), source.expert(2)[1:], strict=True):
        np.testing.assert_array_equal(one, two)


def test_matrices_larger_than_the_block_of_numbers() -> None:
    gate, _, _ = RandomWeights(4, 2048, 768).expert(100)
    assert gate.shape == (768, 2048) and np.isfinite(gate).all()
