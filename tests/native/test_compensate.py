"""kt_compensate against the same operations in NumPy, on every level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native.support import guarded
from numpy.typing import NDArray

from ktconv import native

F32 = NDArray[np.float32]
Found = tuple[NDArray[np.int8], F32, NDArray[np.float64]]


def reference(top: int, weights: F32, factor: F32, step: F32, groups: Any) -> Found:
    """The contract in ktconv_convert.h, column by column."""
    left, (cols, rows) = weights.copy(), weights.shape
    codes, errors, loss = np.zeros((cols, rows), np.int8), np.zeros_like(weights), np.zeros(rows)
    for j in range(cols):
        own = step[groups[j]]
        with np.errstate(all="ignore"):
            at = np.where(own > 0, left[j] / np.where(own > 0, own, 1), 0).astype(np.float32)
        code = np.rint(np.clip(at, -top, top)).astype(np.float32)
        errors[j] = (left[j] - code * own) / factor[j, j]
        codes[j] = code
        loss += errors[j].astype(np.float64) ** 2
        left[j + 1 :] -= errors[j] * factor[j, j + 1 :, None]
    return codes, errors, loss


def case(rows: int, cols: int, groups: int, seed: int = 0) -> tuple[F32, F32, F32, Any]:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((cols, rows)).astype(np.float32)
    weights[:, ::3] *= np.float32(2.0**90)
    factor = np.triu(rng.standard_normal((cols, cols)) / 4).astype(np.float32)
    np.fill_diagonal(factor, rng.uniform(0.5, 2, cols))
    step = (np.abs(weights).max(axis=0) / rng.uniform(5, 9, (groups, 1))).astype("f4")
    step[:, 1::7] = 0
    return weights, factor, step, rng.integers(0, groups, cols).astype(np.int32)


@pytest.mark.parametrize("top", [7, 127])
@pytest.mark.parametrize("shape", [(1, 1, 1), (15, 33, 2), (16, 128, 1), (49, 127, 5)])
def test_every_level_is_the_contract(isa: str, shape: tuple[int, int, int], top: int) -> None:
    weights, factor, step, groups = case(*shape)
    loss = np.zeros(shape[0])
    codes, errors = native.compensate(top, weights, factor, step, groups, loss)
    expected = reference(top, weights, factor, step, groups)
    assert np.array_equal(codes, expected[0])
    assert errors.tobytes() == expected[1].tobytes()
    assert loss.tobytes() == expected[2].tobytes()
    assert np.abs(codes).max() <= top and not codes[step[groups] <= 0].any()


def test_weights_at_a_guard_page(isa: str) -> None:
    """Also of rows that do not fill the last of those computed at once."""
    for rows in (16, 17):
        weights, factor, step, groups = case(rows, 64, 2)
        wanted = native.compensate(7, weights, factor, step, groups, np.zeros(rows))
        with guarded(weights.nbytes) as room:
            inside = room.view(np.float32).reshape(weights.shape)
            inside[:] = weights
            found = native.compensate(7, inside, factor, step, groups, np.zeros(rows))
            assert np.array_equal(found[0], wanted[0])
            del inside


def test_rows_apart_and_loss_that_continues(isa: str) -> None:
    weights, factor, step, groups = case(20, 64, 1)
    wide = np.full((64, 70), np.nan, np.float32)
    wide[:, 30:50] = weights
    once = np.zeros(20)
    expected, _ = native.compensate(7, weights, factor, step, groups, once)
    loss = once.copy()
    codes, _ = native.compensate(7, wide[:, 30:50], factor, step, groups, loss)
    assert np.array_equal(codes, expected)
    np.testing.assert_allclose(loss, 2 * once, rtol=1e-12)


def test_ties_go_to_even_and_codes_stay_in_range(isa: str) -> None:
    weights = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 100, -100, np.inf]], np.float32).T.copy()
    eye, groups = np.eye(8, dtype=np.float32), np.zeros(8, np.int32)
    codes, _ = native.compensate(7, weights, eye, np.ones((1, 1), "f4"), groups, np.zeros(1))
    assert codes[:, 0].tolist() == [0, 2, 2, 0, -2, 7, -7, 7]


@pytest.mark.parametrize(
    "change",
    [
        {"factor": -np.eye(8, dtype=np.float32)},
        {"factor": np.full((8, 8), np.nan, np.float32)},
        {"factor": np.eye(7, dtype=np.float32)},
        {"groups": np.full(8, 1, np.int32)},
        {"groups": np.full(8, -1, np.int32)},
        {"weights": np.ones((8, 3))},
        {"weights": np.ones((3, 8), np.float32).T},
        {"step": np.ones((1, 2), np.float32)},
        {"loss": np.zeros(3, np.float32)},
        {"top": 0},
        {"top": 128},
    ],
)
def test_refusals(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "top": 7,
        "weights": np.ones((8, 3), np.float32),
        "factor": np.eye(8, dtype=np.float32),
        "step": np.ones((1, 3), np.float32),
        "groups": np.zeros(8, np.int32),
        "loss": np.zeros(3),
    }
    native.compensate(*given.values())
    with pytest.raises(ValueError):
        native.compensate(*(given | change).values())


def test_too_many_columns() -> None:
    weights, factor, step, groups = case(2, native.BLOCK_COLS + 1, 1)
    with pytest.raises(ValueError):
        native.compensate(7, weights, factor, step, groups, np.zeros(2))
