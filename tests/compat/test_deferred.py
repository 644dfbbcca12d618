"""Deferred experts: which, into which sum, and that none is lost or added twice (D8)."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from ktconv.errors import UsageError

from .conftest import EXACT, EXPERTS, TOP_K, Make, batch, error, expected, stacks

torch = pytest.importorskip("torch")

from ktconv.compat.kt import KTMoEWrapper  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.fixture
def layers(make: Make, tmp_path: Any) -> list[KTMoEWrapper]:
    """Three layers of one model, not numbered one by one; each token defers 2 of its 3 experts."""
    return [
        make(stacks(n), layer_idx=n, path=tmp_path, max_deferred_experts_per_token=2)
        for n in (0, 3, 4)
    ]


def kept(given: Any, keep: int = 1) -> tuple[Any, Any]:
    """ids of each token's `keep` experts of largest weight, and of the others."""
    order = given.weights.argsort(dim=1, descending=True)
    now, later = given.ids.clone(), given.ids.clone()
    now.scatter_(1, order[:, keep:], -1)
    later.scatter_(1, order[:, :keep], -1)
    return now, later


def sums(given: Any, n: int) -> tuple[Any, Any, Any]:
    """All of layer n, what it keeps, what it defers."""
    now, later = kept(given)
    return tuple(
        expected(stacks(n), given.x, ids, given.weights) for ids in (given.ids, now, later)
    )


@pytest.mark.parametrize("background", [False, True])
def test_a_layer_adds_what_the_one_before_has_deferred(
    layers: list[KTMoEWrapper], background: bool
) -> None:
    """Twice, as nothing of the first pass may be left."""
    for seed in (0, 1):
        given = [batch(6, seed + n) for n in range(3)]
        found = []
        for wrapper, one in zip(layers, given, strict=True):
            if background:
                wrapper.submit_forward(*one)
                found.append(wrapper.sync_forward(one.x))
            else:
                found.append(wrapper.forward(*one))
        (_, first, left), (_, second, more), (third, _, _) = (
            sums(one, n) for one, n in zip(given, (0, 3, 4), strict=True)
        )
        for y, reference in zip(found, (first, second + left, third + more), strict=True):
            assert error(y, reference) < EXACT


def test_nothing_is_lost_over_a_pass(layers: list[KTMoEWrapper]) -> None:
    given = batch(5)
    total = sum(wrapper.forward(given.x.float(), *given[1:]) for wrapper in layers)
    whole = sum(expected(stacks(n), *given) for n in (0, 3, 4))
    assert error(total, whole) < EXACT


def test_calls_may_all_be_submitted_first(layers: list[KTMoEWrapper]) -> None:
    given = batch(5)
    for wrapper in layers:
        wrapper.submit_forward(given.x.float(), *given[1:])
    total = sum(wrapper.sync_forward(given.x) for wrapper in layers)
    assert error(total, sum(expected(stacks(n), *given) for n in (0, 3, 4))) < EXACT


def test_d8_each_token_for_itself(layers: list[KTMoEWrapper]) -> None:
    """The published vector: kt_kernel keeps expert 1 of the second token, since the first one's
    other expert is deferred only if no token of the batch protects it."""
    first = layers[0]
    given = batch(2, top_k=TOP_K)
    ids = torch.tensor([[0, 1, -1], [1, 2, -1]])
    weights = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0]])
    together = first.forward(given.x, ids, weights)
    KTMoEWrapper.clear_buffer_cache()
    now = torch.tensor([[0, -1, -1], [1, -1, -1]])
    assert error(together, expected(stacks(0), given.x, now, weights)) < EXACT
    for token in range(2):
        alone = first.forward(*(one[token : token + 1] for one in (given.x, ids, weights)))
        assert torch.equal(alone[0], together[token])
        KTMoEWrapper.clear_buffer_cache()


def test_d8_the_last_layer_defers_nothing(make: Make, tmp_path: Any) -> None:
    """Nor does a layer alone, however often it is called."""
    wrapper, given = make(path=tmp_path, max_deferred_experts_per_token=TOP_K), batch(4)
    for _ in range(3):
        assert error(wrapper.forward(*given), expected(stacks(), *given)) < EXACT


def test_d8_a_layer_that_is_called_again_adds_nothing_again(layers: list[KTMoEWrapper]) -> None:
    given = batch(5)
    layers[1].forward(*given)
    whole, _, _ = sums(given, 4)
    _, _, left = sums(given, 3)
    assert error(layers[2].forward(*given), whole + left) < EXACT
    for _ in range(2):
        assert error(layers[2].forward(*given), whole) < EXACT


@pytest.mark.parametrize(
    ("which", "tokens"),
    [(0, 5), (2, 5), (1, 4)],  # the same layer, one too far, another batch
)
def test_d8_what_no_sum_would_have_is_an_error(
    layers: list[KTMoEWrapper], which: int, tokens: int
) -> None:
    """Once: the next call begins a new pass."""
    layers[0].forward(*batch(5))
    given, wrapper = batch(tokens), layers[which]
    message = "layer 0 deferred experts of 5 tokens to layer 3, but layer"
    with pytest.raises(UsageError, match=message) as refused:
        wrapper.forward(*given)
    assert "call layers in order" in str(refused.value.hint)
    own, now, _ = sums(given, wrapper.layer_idx)
    assert error(wrapper.forward(*given), own if which == 2 else now) < EXACT


def test_a_pass_that_was_given_up(layers: list[KTMoEWrapper]) -> None:
    layers[0].forward(*batch(5))
    KTMoEWrapper.clear_buffer_cache()
    given = batch(3)
    assert error(layers[0].forward(*given), sums(given, 0)[1]) < EXACT


def test_a_pass_that_failed(layers: list[KTMoEWrapper]) -> None:
    """Its error is the only one: what it deferred is no reason for another."""
    given, layer = batch(5), layers[0]._layer

    def failing(*_: Any, **__: Any) -> None:
        raise UsageError("no luck")

    failing.pool = layers[0].layer.pool  # type: ignore[attr-defined]
    layers[0]._layer = failing  # type: ignore[assignment]
    with pytest.raises(UsageError, match="no luck"):
        layers[0].forward(*given)
    layers[0]._layer = layer
    assert error(layers[0].forward(*given), sums(given, 0)[1]) < EXACT
    KTMoEWrapper.clear_buffer_cache()


def test_d8_models_do_not_mix(make: Make, tmp_path: Any) -> None:
    """Of other weights, and of the same ones loaded twice, in any order of construction."""
    made: dict[tuple[str, int], KTMoEWrapper] = {}
    for name, n in (("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("b", 1)):
        path = tmp_path / ("other" if name == "b" else "same")
        seed = 10 * "abc".index(name) + n
        made[name, n] = make(stacks(seed), layer_idx=n, path=path, max_deferred_experts_per_token=2)
    given = {name: batch(4, seed) for seed, name in enumerate("abc")}
    for name in "abc":
        made[name, 0].forward(*given[name])
    for name in "bca":
        seed = 10 * "abc".index(name)
        left = expected(stacks(seed), given[name].x, kept(given[name])[1], given[name].weights)
        reference = expected(stacks(seed + 1), *given[name]) + left
        assert error(made[name, 1].forward(*given[name]), reference) < EXACT


def test_models_end_with_their_wrappers(make: Make, tmp_path: Any) -> None:
    first = [make(layer_idx=n, path=tmp_path, max_deferred_experts_per_token=2) for n in (0, 1)]
    first[0].forward(*batch(3))
    del first
    gc.collect()
    again = make(layer_idx=0, path=tmp_path, max_deferred_experts_per_token=2)
    assert error(again.forward(*batch(3)), expected(stacks(), *batch(3))) < EXACT  # it is the last


def test_a_mask_holds_for_deferred_experts(layers: list[KTMoEWrapper]) -> None:
    """As it was when the layer was called."""
    layers[0].gpu_experts_mask[[0, 1, 2]] = True
    given, skip = batch(6), layers[0].gpu_experts_mask.clone()
    layers[0].forward(*given)
    layers[0].gpu_experts_mask[:] = True
    y = layers[1].forward(*given)
    later = kept(given)[1]
    left = expected(stacks(0), given.x, later, given.weights, skip=skip)
    assert error(y, sums(given, 3)[1] + left) < EXACT
    KTMoEWrapper.clear_buffer_cache()


@pytest.mark.parametrize("deferred", [1, TOP_K, EXPERTS])
def test_any_number_may_be_deferred(make: Make, tmp_path: Any, deferred: int) -> None:
    given = batch(6)
    one, two = (
        make(layer_idx=n, path=tmp_path, max_deferred_experts_per_token=deferred) for n in (0, 1)
    )
    now, later = kept(given, max(0, TOP_K - deferred))
    y = one.forward(*given)
    assert torch.count_nonzero(y) if deferred < TOP_K else not y.any()
    left = expected(stacks(), given.x, later, given.weights)
    assert error(two.forward(*given), expected(stacks(), *given) + left) < EXACT
    reference = expected(stacks(), given.x, now, given.weights)
    assert deferred >= TOP_K or error(y, reference) < EXACT
