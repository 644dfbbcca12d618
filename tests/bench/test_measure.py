"""Timing: inputs, the proof before it, what is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktconv.bench import measure
from ktconv.bench.measure import Batch, Effort, Truth, check, make_batch, sample
from ktconv.bench.routing import parse_routing
from ktconv.bench.weights import RandomWeights
from ktconv.errors import VerificationError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.moe import KERNEL_BOUND, METHODS, Experts, pack_experts
from ktconv.pool import Pool

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 128, 256, 6, 2


def experts_of(method: str) -> Experts:
    source = RandomWeights(0, HIDDEN, INTERMEDIATE)
    origins = [index % 3 for index in range(EXPERTS)]
    return pack_experts(METHODS[method], source.expert, origins, HIDDEN, INTERMEDIATE)


def batch_of(tokens: int, **effort: Any) -> Batch:
    ids = parse_routing("balanced").iterations(tokens, EXPERTS, TOP_K, 0)
    return make_batch(ids, tokens, HIDDEN, TOP_K, 0, Effort(**effort))


def test_batches_repeat_and_weights_sum_to_one() -> None:
    first, again = batch_of(5, iterations=3), batch_of(5, iterations=3)
    assert np.array_equal(first.x, again.x) and len(first.ids) == 5
    assert first.weights.sum(axis=1) == pytest.approx(np.ones(5))
    assert abs(bf16_to_f32(first.x).std() - 1) < 0.2
    assert len(batch_of(5).ids) > 100 > len(batch_of(20_000).ids) > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_right_kernel_passes(method: str) -> None:
    experts, batch = experts_of(method), batch_of(33, iterations=1)
    with Pool(2) as pool:
        errors = check(experts, batch, Truth(experts, batch), pool)
    assert errors.kernel and errors.kernel < KERNEL_BOUND / 2
    assert 0.9 * errors.kernel < errors.relative <= METHODS[method].bound
    assert errors.source and errors.source >= 0.9 * errors.relative


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, batch = experts_of("bf16"), batch_of(9, iterations=1)
    right = experts.forward

    def wrong(*arguments: Any) -> Any:
        y = right(*arguments)
        y[-1, -1] = 0  # one number of 9 * 128
        return y

    monkeypatch.setattr(experts, "forward", wrong)
    with Pool(1) as pool, pytest.raises(VerificationError, match="bf16 kernel is wrong"):
        check(experts, batch, Truth(experts, batch), pool)


def test_a_kernel_that_gives_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, batch = experts_of("int8"), batch_of(1, iterations=1)
    monkeypatch.setattr(experts, "forward", lambda *_: np.full((1, HIDDEN), 0x7FC0, np.uint16))
    with Pool(1) as pool, pytest.raises(VerificationError, match="wrong"):
        check(experts, batch, Truth(experts, batch), pool)


@pytest.mark.parametrize("tokens", [1, 2, 3, 100])
def test_first_middle_and_last_tokens_are_checked(tokens: int) -> None:
    experts, batch = experts_of("bf16"), batch_of(tokens, iterations=1)
    assert Truth(experts, batch).tokens == sorted({0, (tokens - 1) // 2, tokens - 1})


def test_iterations_are_counted() -> None:
    experts = experts_of("int4")
    with Pool(1) as pool:
        for iterations in (1, 4):
            batch = batch_of(3, iterations=iterations)
            assert len(sample(experts, batch, pool, Effort(9.0, iterations)).seconds) == iterations
        least = sample(experts, batch_of(3), pool, Effort(0.0))
    assert len(least.seconds) == 1 and least.seconds[0] > 0


def test_pairs_and_distinct_experts_leave_skipped_ids_out() -> None:
    experts = experts_of("int4")
    ids = np.array([[0, -1], [2, 0], [-1, -1]], np.int64)
    batch = Batch(np.zeros((3, HIDDEN), np.uint16), np.ones((3, 2), np.float32), [ids])
    with Pool(1) as pool:
        found = sample(experts, batch, pool, Effort(iterations=2))
    assert (found.pairs, found.distinct) == (3.0, 2.0)


def test_what_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy time of all CPUs beyond this process's own; less than two ticks is rounding."""
    busy = iter([10.0, 14.0, 10.0, 10.001])
    monkeypatch.setattr(measure, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(measure, "_own_seconds", lambda: 1.0)
    assert measure._Others().share() > 0.5
    assert measure._Others().share() == 0.0


def test_weights_repeat_and_experts_differ() -> None:
    source = RandomWeights(3, HIDDEN, INTERMEDIATE)
    gate, up, down = source.expert(1)
    assert gate.shape == up.shape == (INTERMEDIATE, HIDDEN) and down.shape == (HIDDEN, INTERMEDIATE)
    assert np.array_equal(gate, RandomWeights(3, HIDDEN, INTERMEDIATE).expert(1)[0])
    assert not np.array_equal(gate, up) and not np.array_equal(gate, source.expert(0)[0])
    assert np.array_equal(gate, bf16_to_f32(f32_to_bf16(gate)))
    assert gate.std() == pytest.approx(HIDDEN**-0.5, rel=0.05)
