"""What squared errors of channels count, by mean squares and numbers of tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ktconv.quantize.packed.importance.channel_weights import FLOOR, SHRINKAGE, channel_weights


def drawn(experts: int = 5, channels: int = 96, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean squares whose sizes differ by experts and channels, and tokens from 0 to many."""
    rng = np.random.default_rng(seed)
    counts = np.array([0, 1, SHRINKAGE, 3, 10**9][:experts])
    means = np.exp(rng.normal(0, 2, (experts, channels)) + 3 * rng.normal(0, 2, (experts, 1)))
    return means.astype(np.float32), counts


def expected(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The formula of docs/calibration.md, with exact sums."""
    found = []
    profiles = [[float(x) / (math.fsum(map(float, m)) / len(m)) for x in m] for m in means]
    seen = [int(n) for n in counts]
    for number, profile in zip(seen, profiles, strict=True):
        exponent = number * 4096 // (number + SHRINKAGE) / 4096
        values = []
        for channel, own in enumerate(profile):
            total = math.fsum(n * p[channel] for n, p in zip(seen, profiles, strict=True))
            layer = max(total / sum(seen), FLOOR)
            values.append(layer * (max(own, FLOOR) / layer) ** exponent)
        mean = math.fsum(values) / len(values)
        found.append([value / mean for value in values])
    return np.array(found)


def test_formula() -> None:
    means, counts = drawn()
    found = channel_weights(means, counts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(means, counts), rtol=1e-6)
    np.testing.assert_allclose(found.mean(axis=1), 1, rtol=1e-5)


def test_many_tokens_speak_for_themselves_and_none_for_the_layer() -> None:
    means, counts = drawn()
    found = channel_weights(means, counts)
    own = means[4] / means[4].mean()
    np.testing.assert_allclose(found[4], np.maximum(own, FLOOR), rtol=5e-3)
    layer = (counts[:, None] * (means / means.mean(axis=1, keepdims=True))).sum(axis=0)
    np.testing.assert_allclose(found[0], layer / counts.sum(), rtol=1e-5)


def test_sizes_of_inputs_do_not_count() -> None:
    """Only how they differ by channel: an expert with large inputs is not the layer."""
    means, counts = drawn()
    sizes = np.float32(2.0) ** np.array([[9], [-20], [30], [-7], [0]])
    np.testing.assert_array_equal(
        channel_weights(means, counts), channel_weights(means * sizes.astype(np.float32), counts)
    )


def test_channels_may_be_scaled() -> None:
    """As by the weights of a norm, where the columns of experts are divided by the same factors:
    outputs are those of before, and so must be the errors that count."""
    means, counts = drawn()
    factors = (np.float32(2.0) ** np.arange(-5, 5))[np.arange(means.shape[1]) % 10]
    means /= means.mean(axis=1, keepdims=True)
    found, scaled = channel_weights(means, counts), channel_weights(means * factors, counts)
    for expert in range(len(counts)):
        ratio = scaled[expert] / found[expert] / factors
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)


def test_means_without_tokens_are_not_looked_at() -> None:
    means, counts = drawn()
    other = means.copy()
    other[0] = 12345
    np.testing.assert_array_equal(channel_weights(means, counts), channel_weights(other, counts))


def test_tokens_whose_inputs_are_all_zero_say_nothing() -> None:
    means, counts = drawn()
    means[3] = 0
    without = counts.copy()
    without[3] = 0
    np.testing.assert_array_equal(channel_weights(means, counts), channel_weights(means, without))


def test_no_channel_counts_nothing() -> None:
    """Weights that no token of the text touched would be free to become anything."""
    means = np.zeros((2, 64), np.float32)
    means[:, 5] = [1e-30, 1e30]
    found = channel_weights(means, np.array([10**12, 10**12]))
    assert np.isfinite(found).all() and (found > 0).all()
    assert found.max() / found.min() <= 64 / FLOOR


@pytest.mark.parametrize(
    ("means", "counts"),
    [(np.ones((2, 32)), [0, 0]), (np.zeros((2, 32)), [5, 5]), (np.eye(2, 32), [0, 0])],
)
def test_nothing_to_go_by(means: np.ndarray, counts: list[int]) -> None:
    with pytest.raises(ValueError, match="no expert has inputs"):
        channel_weights(means.astype(np.float32), np.array(counts))


def test_extremes_of_float32() -> None:
    means, counts = drawn()
    tiny, huge = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    means[1], means[2], means[3, ::2] = tiny, huge, huge
    found = channel_weights(means, counts)
    assert np.isfinite(found).all() and found.min() > 0 and found.max() <= means.shape[1]


def test_order_of_channels_and_memory_layout_do_not_matter_beyond_rounding() -> None:
    means, counts = drawn(channels=1000)
    order = np.random.default_rng(1).permutation(1000)
    found = channel_weights(means, counts)
    np.testing.assert_allclose(channel_weights(means[:, order], counts), found[:, order], 2e-7)
    np.testing.assert_array_equal(channel_weights(np.asfortranarray(means), counts), found)
