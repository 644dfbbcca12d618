"""Timing: inputs, the proof before it, what is counted."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktconv.bench import measure
from ktconv.bench.measure import (
    Batch,
    Effort,
    Reference,
    batch_bytes,
    check,
    checked_tokens,
    make_batch,
    sample,
    share_of_others,
)
from ktconv.bench.routing import parse_routing
from ktconv.bench.weights import RandomWeights
from ktconv.errors import VerificationError
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.runtime.layers import KERNEL_BOUND, Experts, pack_experts
from ktconv.system.pool import Pool

pytestmark = pytest.mark.slow

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 128, 256, 6, 2


def experts_of(method: str) -> Experts:
    source = RandomWeights(0, HIDDEN, INTERMEDIATE)
    origins = [index % 3 for index in range(EXPERTS)]
    return pack_experts(FORMATS[method], source.expert, origins, HIDDEN, INTERMEDIATE)


def batch_of(tokens: int, **effort: Any) -> Batch:
    ids = parse_routing("balanced").iterations(tokens, EXPERTS, TOP_K, 0)
    return make_batch(ids, tokens, HIDDEN, TOP_K, 0, Effort(**effort))


def test_batches_repeat_and_weights_sum_to_one() -> None:
    first, again = batch_of(5, iterations=3), batch_of(5, iterations=3)
    assert np.array_equal(first.x, again.x) and len(first.ids) == 5
    assert first.weights.sum(axis=1) == pytest.approx(np.ones(5))
    assert abs(bf16_to_f32(first.x).std() - 1) < 0.2
    assert len(batch_of(5).ids) > 100 > len(batch_of(20_000).ids) > 0


@pytest.mark.parametrize("method", FORMATS)
def test_a_right_kernel_passes(method: str) -> None:
    experts, batch = experts_of(method), batch_of(33, iterations=1)
    with Pool(2) as pool:
        errors = check(experts, batch, Reference(experts, batch), pool)
    assert errors.kernel and errors.kernel < KERNEL_BOUND / 2
    assert 0.9 * errors.kernel < errors.relative <= FORMATS[method].tolerance
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
        check(experts, batch, Reference(experts, batch), pool)


Change = Callable[[Any, Any], None]


def spoil(experts: Experts, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Each call of the layer is followed by change(ids, y)."""
    right = experts.layer.call

    def call(pool: Pool, x: Any, ids: Any, weights: Any, y: Any, scratch: Any) -> Any:
        done = right(pool, x, ids, weights, y, scratch)

        def run() -> None:
            before = y.copy()
            done()
            change(before, y)

        return run

    monkeypatch.setattr(experts.layer, "call", call)


def not_written(before: Any, y: Any) -> None:
    y[100:101] = before[100:101]


def zeros(_: Any, y: Any) -> None:
    y[100:101] = 0


def one_bit(_: Any, y: Any) -> None:
    y[100:101, 5] ^= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (not_written, "y of token 100 of 400 is not finite, or not written"),
        (zeros, "token 100 of 400 has another result with other tokens in the batch"),
        (one_bit, "token 100 of 400 has another result with other tokens in the batch"),
    ],
)
def test_every_token_is_looked_at(
    change: Change, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, batch = experts_of("int8"), batch_of(400, iterations=1)
    reference = Reference(experts, batch)
    assert 100 not in reference.tokens
    spoil(experts, monkeypatch, change)
    with Pool(2) as pool, pytest.raises(VerificationError, match=words):
        check(experts, batch, reference, pool)


def test_a_kernel_that_gives_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, batch = experts_of("int8"), batch_of(1, iterations=1)
    spoil(experts, monkeypatch, lambda _, y: y.fill(0x7FC0))
    with Pool(1) as pool, pytest.raises(VerificationError, match="token 0 of 1 is not finite"):
        check(experts, batch, Reference(experts, batch), pool)


def test_a_kernel_that_breaks_off_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, batch = experts_of("int8"), batch_of(3, iterations=1)
    with Pool(1) as pool:
        check(experts, batch, Reference(experts, batch), pool)
        spoil(experts, monkeypatch, lambda _, y: y[2:].fill(0xFFFF))
        with pytest.raises(VerificationError, match="token 2 of 3"):
            sample(experts, batch, pool, Effort(iterations=1))


def test_bits_may_differ_only_where_the_header_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of bf16: AMX levels of float formats."""
    batch = batch_of(7, iterations=1)
    for method, level, same in (
        ("bf16", "amx", False),
        ("int8", "amx", True),
        ("gint4-32", "amx", True),
        ("bf16", "avx512", True),
    ):
        experts = experts_of(method)
        y = f32_to_bf16(np.ones(batch.x.shape, np.float32))
        near, far = y.copy(), y.copy()
        near[6, 3] += 1
        far[6] += 3
        monkeypatch.setattr(measure, "isa", lambda level=level: level)
        measure.expect_same(experts, y, y)
        for other, refused in ((near, same), (far, True)):
            if refused:
                with pytest.raises(VerificationError, match="token 6 of 7"):
                    measure.expect_same(experts, y, other)
            else:
                measure.expect_same(experts, y, other)


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ([0.004] * 16, None),
        ([0.007] + [0.002] * 15, None),  # int8 activations, rounded to the other side
        ([0.006] * 16, "relative error 0.006 against float32, at most 0.005 is right"),
        ([0.015] + [0.0] * 15, "relative error 0.015 of a token against float32, at most 0.01"),
        ([float("nan")] + [0.0] * 15, "relative error nan"),
    ],
)
def test_how_wrong_is_wrong(errors: list[float], words: str | None) -> None:
    expected = np.random.default_rng(0).standard_normal((16, HIDDEN), np.float32)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    got = expected * (1 + np.array(errors, np.float32)[:, None])
    if words is None:
        measure.expect_right(experts_of("int8"), got, expected)
        return
    with pytest.raises(VerificationError, match=words):
        measure.expect_right(experts_of("int8"), got, expected)


def test_a_routing_without_experts_is_not_what_is_checked() -> None:
    experts, batch = experts_of("int8"), batch_of(2, iterations=3)
    batch.ids[0][:] = -1
    batch.ids[1][:] = -1
    assert batch.checked == 2
    reference = Reference(experts, batch)
    assert reference.ids is batch.ids[2] and reference.packed.any()


@pytest.mark.parametrize("tokens", [1, 2, 3, 16])
def test_all_tokens_of_small_batches_are_checked(tokens: int) -> None:
    experts, batch = experts_of("bf16"), batch_of(tokens, iterations=1)
    assert Reference(experts, batch).tokens == list(range(tokens))


@pytest.mark.parametrize("tokens", [17, 100, 1024, 2048, 2049, 5000])
@pytest.mark.parametrize("most", [3, 20, 1000])
def test_tokens_of_large_batches_are_checked_far_and_wide(tokens: int, most: int) -> None:
    origins = np.random.default_rng(tokens).integers(-1, 256, (tokens, 8))
    chosen = checked_tokens(origins, most)
    needed = {int(origin) for token in chosen for origin in origins[token] if origin >= 0}
    assert len(chosen) == 3 or len(needed) <= most
    assert {0, tokens - 1} <= set(chosen)
    if most == 1000:
        assert {2047, 2048} <= set(chosen) or tokens <= 2048
        assert max(np.diff(chosen)) <= tokens / 15 + 2


def test_tokens_that_have_experts_are_checked() -> None:
    origins = np.full((1000, 2), -1)
    origins[400:410] = 3
    assert {400, 409} <= set(checked_tokens(origins, 100))


def test_memory_of_a_batch_is_foreseen() -> None:
    """What NumPy asks for, from drawing to checking."""
    experts = experts_of("int8")
    for tokens, effort in ((3000, Effort()), (9000, Effort(iterations=1))):
        foreseen = batch_bytes(tokens, HIDDEN, TOP_K, effort)
        ids = parse_routing("concentrated").iterations(tokens, EXPERTS, TOP_K, 0)
        with Pool(1) as pool:
            scratch = experts.layer.scratch(tokens, TOP_K, pool).nbytes
            tracemalloc.start()
            batch = make_batch(ids, tokens, HIDDEN, TOP_K, 0, effort)
            check(experts, batch, Reference(experts, batch), pool)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= foreseen + 2 * scratch + (4 << 20)


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


def test_what_others_take() -> None:
    """Busy time of all CPUs beyond this process's own; less than two ticks is rounding."""
    cpus = os.cpu_count() or 1
    assert share_of_others((5.0, 10.0, 1.0), (7.0, 14.0, 2.0)) == 3.0 / (2.0 * cpus)
    assert share_of_others((5.0, 10.0, 1.0), (7.0, 10.001, 1.0)) == 0.0


def test_weights_repeat_and_experts_differ() -> None:
    source = RandomWeights(3, HIDDEN, INTERMEDIATE)
    gate, up, down = source.expert(1)
    assert gate.shape == up.shape == (INTERMEDIATE, HIDDEN) and down.shape == (HIDDEN, INTERMEDIATE)
    assert np.array_equal(gate, RandomWeights(3, HIDDEN, INTERMEDIATE).expert(1)[0])
    assert not np.array_equal(gate, up) and not np.array_equal(gate, source.expert(0)[0])
    assert np.array_equal(gate, bf16_to_f32(f32_to_bf16(gate)))
    assert gate.std() == pytest.approx(HIDDEN**-0.5, rel=0.05)
