"""Blocks of ggml: what is encoded, decoded by the package gguf, and the audit's opinion of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.levels import at_level

from ktconv import native
from ktconv.native import BLOCK_TYPES

gguf = pytest.importorskip("gguf")

ROWS, COLS = 9, 1280  # more columns than a batch of vectors, and no multiple of it
# Relative RMS errors of ggml's own quantizer (llama-cpp-python 0.3.36) on normal weights, without
# importance: of the weights of `_weights`, which a search must not exceed.
GGML = {"Q4_0": 0.0861, "Q8_0": 0.00536, "Q4_K": 0.0715, "Q5_K": 0.0362, "Q6_K": 0.0178,
        "IQ4_NL": 0.0762, "MXFP4": 0.1142}  # fmt: skip


def _weights(seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((ROWS, COLS)) * 0.02).astype(np.float32)


def _matrix(weights: np.ndarray) -> native.Matrix:
    data = np.ascontiguousarray(weights).reshape(-1).view(np.uint8)
    return native.Matrix(data, "F32", *weights.shape)


def _decoded(kind: str, blocks: np.ndarray, rows: int = ROWS) -> np.ndarray:
    return gguf.quants.dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType[kind])


def _error(values: np.ndarray, weights: np.ndarray, counted: np.ndarray | float = 1.0) -> float:
    off = (values - weights).astype(np.float64)
    whole = (counted * weights.astype(np.float64) ** 2).sum()
    return float(np.sqrt((counted * off**2).sum() / whole))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_errors_are_at_most_those_of_ggml(kind: str) -> None:
    weights = _weights()
    values = _decoded(kind, native.encode_blocks(kind, _matrix(weights)))
    assert 0.9 * GGML[kind] < _error(values, weights) < 0.99 * GGML[kind]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_importance_lowers_the_error_that_it_weighs(kind: str) -> None:
    weights = _weights(1)
    counted = np.exp(2 * np.random.default_rng(2).standard_normal(COLS)).astype(np.float32)
    plain = _decoded(kind, native.encode_blocks(kind, _matrix(weights)))
    weighed = _decoded(kind, native.encode_blocks(kind, _matrix(weights), counted))
    assert _error(weighed, weights, counted) < 0.99 * _error(plain, weights, counted)
    same = native.encode_blocks(kind, _matrix(weights), np.full(COLS, 4, np.float32))
    assert np.array_equal(same, native.encode_blocks(kind, _matrix(weights)))


def _odd() -> np.ndarray:
    """Rows of zeros, denormals, equal, positive, negative, tiny and large weights, one outlier."""
    weights = _weights(3)
    weights[0], weights[1], weights[2] = 0, 1e-39, 0.37
    weights[3], weights[4] = np.abs(weights[3]), -np.abs(weights[4])
    weights[5] *= np.float32(1e-5)
    weights[6] *= np.float32(1e5)
    weights[7, 3] = 50
    weights[8, ::2] = 0
    return weights


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_level_gives_the_same_bytes_and_sums(kind: str, counts: bool) -> None:
    weights = _odd()
    counted = np.abs(_weights(4)[0]) * 50 if counts else None
    if counted is not None:
        counted[:32] = 0  # a block that nothing counts in
    found = []
    for level in native.isa_available():
        with at_level(level):
            blocks = native.encode_blocks(kind, _matrix(weights), counted)
            found.append((blocks.tobytes(), native.audit_blocks(kind, _matrix(weights), blocks)))
    assert all(one == found[0] for one in found)


def _q4_0(weights: np.ndarray) -> np.ndarray:
    """Blocks of Q4_0 where all columns count the same, as docs/gguf.md says."""
    x = weights.reshape(-1, 32)
    low, high = x.min(axis=1), x.max(axis=1)
    largest = np.where(high < -low, low, high)
    largest = np.where(np.abs(largest) < 2.0**-30, np.float32(0), largest)
    m = np.rint(x * (_inverse(largest) * np.float32(511))[:, None]).astype(np.int32)
    best: list[np.ndarray] = [np.zeros(len(x), np.float32), np.ones(len(x), np.float32)]
    for inverse in (-468, -513, -544, 404, 449, 494, None):
        if inverse is None:
            found = np.rint(np.float32(32768) * best[1] * _inverse(best[0]))
            of_each = np.clip(found, -544, 544).astype(np.int32)
        else:
            of_each = np.full(len(x), inverse)
        q = np.minimum((m * of_each[:, None] + 2**14) >> 15, 7)
        sums = [a.sum(axis=1).astype(np.float32) for a in (m * q, q * q)]
        better = sums[0] * sums[0] * best[1] > best[0] * best[0] * sums[1]
        best = [np.where(better, *both) for both in zip(sums, best, strict=True)]
    d = best[0] * _inverse(best[1]) * (largest * np.float32(1 / 511))
    d = np.clip(d, -65504, 65504).astype("<f2")
    over = _inverse(d.astype(np.float32))
    q = (np.clip(np.rint(x * over[:, None]), -8, 7) + 8).astype(np.uint8)
    return np.concatenate([d.view(np.uint8).reshape(-1, 2), q[:, :16] | q[:, 16:] << 4], axis=1)


def _inverse(x: np.ndarray) -> np.ndarray:
    """In binary32; of 0: 0."""
    return np.float32(1) / np.where(x == 0, np.float32(np.inf), x.astype(np.float32))


@pytest.mark.parametrize("cols", [COLS, 32, 512, 544, 768])
def test_q4_0_is_chosen_as_documented(cols: int) -> None:
    """Blocks of any number: batches, and what is left of them."""
    for weights in (_odd(), _weights(9) ** 3, np.rint(_weights(10) * 200) / 8):
        part = np.ascontiguousarray(weights[:, :cols], np.float32)
        blocks = native.encode_blocks("Q4_0", _matrix(part)).reshape(-1, 18)
        wrong = np.flatnonzero((blocks != _q4_0(part)).any(axis=1))
        assert not len(wrong), (wrong, part.reshape(-1, 32)[wrong[0]])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_audit_agrees_with_the_package(kind: str) -> None:
    weights = _odd()
    blocks = native.encode_blocks(kind, _matrix(weights))
    found, values = native.audit_blocks(kind, _matrix(weights), blocks), _decoded(kind, blocks)
    assert found.other_codes == 0
    off = (values - weights).astype(np.float64)
    assert found.squared_error == pytest.approx(float((off**2).sum()), rel=1e-6)
    assert found.squared_value == pytest.approx(float((values.astype(np.float64) ** 2).sum()))
    assert found.zeros == np.count_nonzero(values == 0)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_audit_sees_a_changed_code(kind: str) -> None:
    weights = _weights(5)
    blocks = native.encode_blocks(kind, _matrix(weights))
    at = {"Q4_K": 100, "Q5_K": 100, "Q6_K": 60}.get(kind, 9)
    blocks[at] ^= 0x33
    assert 1 <= native.audit_blocks(kind, _matrix(weights), blocks).other_codes <= 2


def test_refusals() -> None:
    weights = _weights()
    with pytest.raises(ValueError, match="multiple of the 256"):
        native.encode_blocks("Q4_K", _matrix(weights[:, :1248]))
    weights[4, 7] = np.nan
    with pytest.raises(native.NonFiniteError) as caught:
        native.encode_blocks("Q4_K", _matrix(weights))
    assert (caught.value.row, caught.value.col) == (4, 7)
    weights[4, 7] = 1e30
    with pytest.raises(ValueError):
        native.encode_blocks("Q8_0", _matrix(weights))
    with pytest.raises(ValueError):
        native.encode_blocks("Q4_1", _matrix(_weights()))


def _weighed(values: np.ndarray, weights: np.ndarray, counted: np.ndarray | float = 1.0) -> float:
    return float((counted * (values - weights).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_only_ratios_of_importance_count(kind: str) -> None:
    """Also where products with it are subnormal, and with runs that do not count."""
    weights = _weights(6)
    counted = np.exp(2 * np.random.default_rng(7).standard_normal(COLS)).astype(np.float32)
    counted[64:96] = 0
    wanted = native.encode_blocks(kind, _matrix(weights), counted)
    for factor in (2.0**-120, 2.0**-60, 2.0**20):
        scaled = counted * np.float32(factor)
        assert np.array_equal(native.encode_blocks(kind, _matrix(weights), scaled), wanted)
    least = native.encode_blocks(kind, _matrix(weights), np.full(COLS, 1e-45, np.float32))
    assert np.array_equal(least, native.encode_blocks(kind, _matrix(weights)))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-5])
def test_no_block_is_worse_than_zeros(kind: str, size: float) -> None:
    """No error exceeds that of zeros, even where scales are subnormal or a run is small."""
    weights = _weights(8) * np.float32(size / 0.02)
    weights[0, 32:256] = np.abs(weights[0, 32:256]) - np.float32(10 * size)
    values = _decoded(kind, native.encode_blocks(kind, _matrix(weights)))
    for start in range(0, COLS, 256):
        for row in range(ROWS):
            own = (row, slice(start, start + 256))
            assert _weighed(values[own], weights[own]) <= _weighed(np.float32(0), weights[own])
