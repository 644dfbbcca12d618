"""Sums of how far two models are apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ktconv.errors import CheckpointError, UsageError

pytestmark = pytest.mark.torch


@pytest.fixture
def streams(torch: Any) -> list[tuple[Any, Any]]:
    """Hidden states of three windows, of a source and of a conversion."""
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for tokens in (70, 70, 5):
        a = torch.randn((1, tokens, 24), generator=generator)
        a[0, 0] *= 1000  # as the first token of many models
        pairs.append((a.bfloat16(), (a + 0.1 * torch.randn(a.shape, generator=generator)).half()))
    return pairs


def test_drift_is_what_it_says(torch: Any, streams: list[tuple[Any, Any]]) -> None:
    from ktconv.model.streamed.compare import Drift

    drift = Drift()
    for a, b in streams:
        drift.add(7, a, b)
        drift.add(2, a, a)
    same, found = drift.result()
    a, b = (torch.cat([pair[n][0] for pair in streams]).double().numpy() for n in (0, 1))
    assert (same.layer, found.layer) == (2, 7)
    assert (same.relative_error, same.token_error, same.cosine) == (0.0, 0.0, 1.0)
    norm = np.linalg.norm
    assert found.relative_error == pytest.approx(norm(a - b) / norm(a), rel=1e-12)
    each = norm(a - b, axis=1) / norm(a, axis=1)
    assert found.token_error == pytest.approx(each.mean(), rel=1e-12)
    assert found.cosine == pytest.approx((a * b).sum() / norm(a) / norm(b), rel=1e-12)
    assert found.relative_error < 0.1 * found.token_error  # what one huge token hides


def test_drift_goes_on_from_a_state(torch: Any, streams: list[tuple[Any, Any]]) -> None:
    from ktconv.model.streamed.compare import Drift

    whole, half, rest = Drift(), Drift(), Drift()
    for layer in range(4):
        for a, b in streams:
            whole.add(layer, a, b)
            (half if layer < 2 else rest).add(layer, a, b)
    again = Drift()
    again.restore(half.state())
    for layer in (2, 3):
        for a, b in streams:
            again.add(layer, a, b)
    assert again.result() == whole.result()
    assert Drift().state()["sums"].size == 0
    rest.restore(Drift().state())
    assert rest.result() == []


def test_drift_of_odd_numbers(torch: Any) -> None:
    from ktconv.model.streamed.compare import Drift

    zeros, ones = torch.zeros(1, 2, 4), torch.ones(1, 2, 4)
    for a, b, error in (
        (zeros, zeros, 0.0),
        (zeros, ones, math.inf),
        (ones, zeros, 1.0),
        (ones, ones * math.nan, math.nan),
        (ones, ones * math.inf, math.inf),
    ):
        drift = Drift()
        drift.add(0, a, b)
        (found,) = drift.result()
        assert (found.relative_error, found.token_error) == pytest.approx(
            (error, error), nan_ok=True
        )
    several = torch.randn(1, 3, 4, 8)  # streams of a model with hyper-connections
    drift.add(1, several, 1.01 * several)
    assert drift.result()[1].token_error == pytest.approx(0.01, rel=1e-4)


def test_hidden_states_are_the_first_tensor_of_an_output(torch: Any) -> None:
    from ktconv.model.streamed.compare import Comparison

    found, hidden = Comparison([]), torch.ones(1, 2, 4)
    found.layer(0, 0, [(hidden, None), (2 * hidden, None)])
    found.layer(1, 0, [(torch.zeros(2, dtype=torch.int64), hidden), (None, hidden)])
    assert [one.relative_error for one in found.drift.result()] == [1.0, 0.0]
    with pytest.raises(CheckpointError, match="not hidden states"):
        found.layer(2, 0, [None, None])


def test_predictions_of_a_broken_model(torch: Any) -> None:
    from ktconv.model.streamed.compare import Predictions

    ids = torch.tensor([[0, 1, 2]])
    right, wrong = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    wrong[..., 3] = 2000.0
    predictions = Predictions([ids, ids])
    predictions.add(0, [right, right])
    predictions.add(1, [right, wrong])
    first, both = predictions.result(1), predictions.result()
    assert first.perplexity_converted == pytest.approx(4.0) and first.tokens == 2
    assert both.perplexity_converted == math.inf and both.tokens == 4
    with pytest.raises(UsageError, match="no text to compare on"):
        Predictions([]).result()
