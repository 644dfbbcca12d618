"""kt_choose_experts against float64, on every level, and levels against one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.routing import routed
from msgspec.structs import replace

from ktconv import native
from ktconv.native import Router
from ktconv.system.arrays import F32, Array
from ktconv.system.pool import Pool

pytestmark = pytest.mark.slow

SCORINGS = tuple(native.SCORINGS)
FLOATS = ("correction", "expert_factor")


def a_router(rng: np.random.Generator, experts: int) -> Router:
    """Any that is possible with so many experts."""
    groups = int(rng.choice([one for one in range(1, experts + 1) if experts % one == 0]))
    groups = groups if rng.random() < 0.6 else 1
    keep = int(rng.integers(1, groups + 1))
    scoring = str(rng.choice(SCORINGS))
    return Router(
        scoring,
        int(rng.integers(1, min(experts // groups * keep, 12) + 1)),
        sinks=0 if scoring == "softmax" else int(rng.choice([0, 0, 3])),
        by_logits=bool(rng.random() < 0.3),
        groups=groups,
        keep=keep,
        group_score=int(rng.integers(1, 3)),
        renormalise=bool(rng.random() < 0.7),
        masked=float(rng.choice([-np.inf, 0.0])),
        p_norm=float(rng.choice([1, 1, 2, np.inf, 3.5])),
        epsilon=float(rng.choice([0, 1e-20, 1e-6])),
        least_sum=float(rng.choice([0, 1e-12, 0.6])),
        factor=float(rng.choice([1, 2.5])),
    )


def a_case(seed: int, experts: int) -> tuple[Router, F32, dict[str, Any]]:
    """Logits of a token are apart from one another, so that rounding does not change ids."""
    rng = np.random.default_rng((seed, experts))
    router = a_router(rng, experts)
    steps = np.arange(experts + router.sinks)
    rows = [rng.permutation(steps) for _ in range(9)]
    logits = (np.array(rows) * 8 / len(steps) - rng.uniform(2, 6)).astype(np.float32)
    arrays = {
        name: rng.standard_normal(experts, np.float32) * np.float32(0.3)
        for name in FLOATS
        if rng.random() < 0.5
    }
    if rng.random() < 0.1:
        arrays["given"] = rng.integers(0, experts, (len(logits), router.top_k))
    return router, logits, arrays


SIZES = [1, 2, 7, 16, 24, 33, 60, 128, 384]


@pytest.mark.parametrize("experts", SIZES)
def test_every_level_is_the_contract(isa: str, experts: int) -> None:
    for seed in range(12):
        router, logits, arrays = a_case(seed, experts)
        ids, weights = native.choose_experts(router, logits, **arrays)
        expected, expected_weights = routed(router, logits, **arrays)
        np.testing.assert_array_equal(ids, expected, err_msg=str((seed, router)))
        np.testing.assert_allclose(
            weights, expected_weights, rtol=1e-6, atol=1e-12, err_msg=str((seed, router))
        )


def extremes(rng: np.random.Generator, tokens: int, logits: int) -> F32:
    """Rows with ties, zeros of both signs, numbers too large and too small for exp, infinities and
    NaN."""
    kinds = np.array(
        [0, -0.0, 1e-40, 80, -80, 87.5, -87.5, 88.5, -88.9, 95, -101, -103.9, 104, -1e30, 3e38]
    )
    rows = rng.standard_normal((tokens, logits)) * rng.choice([0.1, 3, 40], (tokens, 1))
    odd = rng.choice(kinds, (tokens, logits))
    rows = np.where(rng.random((tokens, logits)) < rng.choice([0, 0.3, 1], (tokens, 1)), odd, rows)
    worst = rng.choice([np.inf, -np.inf, np.nan], (tokens, logits))
    share = np.where(np.arange(tokens) % 4 == 0, 0.1, 0.0)[:, None]
    return np.where(rng.random((tokens, logits)) < share, worst, rows).astype(np.float32)


@pytest.mark.parametrize("experts", [1, 5, 16, 33, 96, 384])
def test_levels_give_the_same_bits(isa: str, experts: int) -> None:
    for seed in range(30):
        rng = np.random.default_rng((seed, experts))
        router = a_router(rng, experts)
        logits = extremes(rng, 16, experts + router.sinks)
        correction = extremes(rng, 1, experts)[0] if seed % 3 == 0 else None
        found = native.choose_experts(router, logits, correction=correction)
        native.use_isa("scalar")
        expected = native.choose_experts(router, logits, correction=correction)
        native.use_isa(isa)
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected], router
        check_rules(router, logits, *found)


def check_rules(router: Router, logits: F32, ids: Array, weights: F32) -> None:
    """What holds of any logits."""
    experts = logits.shape[1] - router.sinks
    assert ((ids >= 0) & (ids < experts)).all()
    assert all(len(set(row)) == router.top_k for row in ids.tolist())
    if router.masked == -np.inf:
        used = ids // (experts // router.groups)
        assert all(len(set(row)) <= router.keep for row in used.tolist())
    assert np.isnan(weights[np.isnan(logits[:, :experts]).any(axis=1)]).all()
    plain = np.isfinite(logits).all(axis=1) & (np.abs(logits) < 1e37).all(axis=1)
    assert np.isfinite(weights[plain]).all()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores_are_as_accurate_as_binary32(isa: str, scoring: str) -> None:
    """Over all logits whose scores are normal numbers: of softmax, of two experts."""
    z = np.linspace(-86, 86, 5001).astype(np.float32)
    logits = np.stack([z, np.zeros_like(z)], axis=1) if scoring == "softmax" else z[:, None]
    count = logits.shape[1]
    router = Router(scoring, count, renormalise=False)
    order = np.tile(np.arange(count), (len(z), 1))
    _, weights = native.choose_experts(router, logits, given=order)
    _, expected = routed(router, logits, given=order)
    np.testing.assert_allclose(weights, expected, rtol=5e-7)


def test_scores_below_the_normal_numbers(isa: str) -> None:
    """They still differ, as those of binary32 do, down to 0."""
    z = np.linspace(-103, -87.5, 200).astype(np.float32)
    logits = np.stack([z, np.zeros_like(z)], axis=1)
    router = Router("softmax", 2, renormalise=False)
    ids, weights = native.choose_experts(router, logits)
    assert (ids == [1, 0]).all()
    np.testing.assert_allclose(weights[:, 1], np.exp(z.astype(np.float64)), rtol=1e-6, atol=2e-45)
    falling = native.choose_experts(router, np.array([[-200, 0]], np.float32))[1]
    assert falling.tolist() == [[1, 0]]
    sigmoid = replace(router, scoring="sigmoid", top_k=1)
    assert native.choose_experts(sigmoid, np.array([[np.inf]], np.float32))[1].tolist() == [[1]]
    assert native.choose_experts(sigmoid, np.array([[-np.inf]], np.float32))[1].tolist() == [[0]]


def test_ties_choose_the_lowest(isa: str) -> None:
    logits = np.zeros((3, 48), np.float32)
    logits[1, 1::2] = -0.0
    logits[2, 20:] = 1
    for scoring in SCORINGS:
        ids, _ = native.choose_experts(Router(scoring, 5), logits)
        assert ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [20, 21, 22, 23, 24]]
        ids, _ = native.choose_experts(Router(scoring, 3, groups=8, keep=2), logits)
        assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [20, 21, 22]]
        ids, _ = native.choose_experts(Router(scoring, 48), logits)
        assert ids[2].tolist() == [*range(20, 48), *range(20)]


@pytest.mark.parametrize("bad", [0, 5, 40])
def test_a_nan_makes_all_weights_of_its_token_nan(isa: str, bad: int) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 41)).astype(np.float32)
    logits[0, bad] = np.nan
    for router in (
        Router("sigmoid", 4),
        Router("sqrtsoftplus", 4, renormalise=False),
        Router("softmax", 4, by_logits=True),
        Router("softmax", 2, jitter=0.1, renormalise=False),
    ):
        ids, weights = native.choose_experts(router, logits)
        assert np.isnan(weights[0]).all() and np.isfinite(weights[1]).all()
        assert bad not in ids[0]  # it counts as -infinity
    softmax, weights = native.choose_experts(Router("softmax", 4), logits)
    assert softmax[0].tolist() == [0, 1, 2, 3] and np.isnan(weights[0]).all()


def test_zero_sums_give_no_nan(isa: str) -> None:
    low = np.full((1, 4), -np.inf, np.float32)
    ids, weights = native.choose_experts(Router("sigmoid", 2), low)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0, 0]]
    assert native.choose_experts(Router("sqrtsoftplus", 2), low)[1].tolist() == [[0, 0]]
    sunk = Router("sigmoid", 2, sinks=2)
    assert native.choose_experts(sunk, low)[1].tolist() == [[0, 0]]


@pytest.mark.parametrize("z", [-1e4, -200, -88, -5, 3, 90])
def test_sinks_share_whatever_their_size(isa: str, z: float) -> None:
    logits = np.full((1, 5), z, np.float32)
    router = Router("sigmoid", 2, sinks=1)
    np.testing.assert_allclose(native.choose_experts(router, logits)[1], [[1 / 3, 1 / 3]])
    tiny = replace(router, epsilon=1e-20)
    expected = 1 / 3 if z > -30 else 0
    assert native.choose_experts(tiny, logits)[1][0, 0] == pytest.approx(
        expected, rel=1e-6, abs=1e-12
    )


def test_threads_change_nothing(isa: str) -> None:
    router, logits, arrays = a_case(4, 60)
    logits = np.tile(logits, (60, 1))
    arrays.pop("given", None)
    alone = native.choose_experts(router, logits, **arrays)
    with Pool(2) as pool:
        together = native.choose_experts(router, logits, **arrays, pool=pool)
    assert [one.tobytes() for one in alone] == [one.tobytes() for one in together]
    with pytest.raises(ValueError, match="closed"):
        native.choose_experts(router, logits, **arrays, pool=pool)


def test_no_tokens() -> None:
    ids, weights = native.choose_experts(Router("softmax", 2), np.empty((0, 4), np.float32))
    assert ids.shape == weights.shape == (0, 2)


BASE = Router("sigmoid", 2, groups=2, keep=1)


@pytest.mark.parametrize(
    "router",
    [
        replace(BASE, groups=3),
        replace(BASE, groups=0),
        replace(BASE, keep=3),
        replace(BASE, keep=0),
        replace(BASE, top_k=5),
        replace(BASE, top_k=0),
        replace(BASE, group_score=3),
        replace(BASE, scoring="softmax", sinks=1),
        replace(BASE, sinks=-1),
        replace(BASE, sinks=8),
        replace(BASE, masked=np.nan),
        replace(BASE, factor=np.inf),
        replace(BASE, p_norm=0.0),
        replace(BASE, epsilon=-1.0),
        replace(BASE, least_sum=np.nan),
        replace(BASE, jitter=0.1),
        Router("softmax", 2, jitter=np.nan, renormalise=False),
        Router("softmax", 2, jitter=0.1),
        Router("softmax", 2, jitter=0.1, renormalise=False, by_logits=True),
    ],
)
def test_refusals(router: Router) -> None:
    with pytest.raises(ValueError):
        native.choose_experts(router, np.zeros((1, 8), np.float32))


def test_refused_arrays() -> None:
    logits = np.zeros((2, 8), np.float32)
    native.choose_experts(BASE, logits)
    for wrong in (logits.astype(np.float64), np.zeros((8, 2), np.float32).T):
        with pytest.raises(ValueError, match="logits"):
            native.choose_experts(BASE, wrong)
    for name in FLOATS:
        array: dict[str, Any] = {name: np.zeros(7, np.float32)}
        with pytest.raises(ValueError, match=name):
            native.choose_experts(BASE, logits, **array)
    for given in ([[0, 8], [0, 1]], [[0, -1], [0, 1]]):
        with pytest.raises(ValueError, match="expert"):
            native.choose_experts(BASE, logits, given=np.array(given))
    with pytest.raises(ValueError, match="given"):
        native.choose_experts(BASE, logits, given=np.zeros((2, 3), np.int64))
    odd = np.zeros(2 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 8)
    with pytest.raises(ValueError, match="logits must be aligned"):
        native.choose_experts(BASE, odd)
    wide = np.zeros((1, native.MAX_ROUTED + 1), np.float32)
    with pytest.raises(ValueError):
        native.choose_experts(Router("sigmoid", 2), wide)
    assert native.choose_experts(Router("sigmoid", 2), wide[:, 1:])[0].tolist() == [[0, 1]]
