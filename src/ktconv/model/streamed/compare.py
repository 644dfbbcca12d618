"""Distance of two models: of their outputs at each layer, and of their predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from ktconv.errors import UsageError
from ktconv.model.streamed.cut import first_tensor
from ktconv.system.arrays import Array

# Positions whose distributions are float64 at a time: with a vocabulary of 200,000, 50 MB each.
_ROWS = 32
_LARGEST = 700.0  # whose exp is a float64
_SUMS = 6  # of `Drift`


class Divergence(Struct, frozen=True):
    """A source model against its conversion on the same text.

    Perplexities are exp of the mean loss. `kl` is of the distributions of the next token, from
    the source's to the converted one's, in nats: mean, and the value that 99% of the positions
    stay within. `top1_agreement` is the share of positions at which both would say the same
    token, `tokens` the number of positions.
    """

    perplexity_source: float
    perplexity_converted: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    tokens: int


class Predictions:
    """Logits of two models for the next token in `texts` [1, T], one after the other."""

    def __init__(self, texts: Sequence[Tensor]) -> None:
        self.texts = texts
        self._found: list[tuple[Tensor, ...]] = []

    def add(self, text: int, logits: Sequence[Tensor]) -> None:
        """The logits [1, T, V] of both for the text of this number; of the source first."""
        source, converted = (one[0, :-1].cpu() for one in logits)
        self._found.append(_compare(source, converted, self.texts[text]))

    def result(self, texts: int | None = None) -> Divergence:
        """Divergence over the first `texts`, or over all. UsageError where there was none."""
        if not self._found:
            raise UsageError("no text to compare on", "give at least one window")
        losses, others, kl, agree = map(torch.cat, zip(*self._found[:texts], strict=True))
        return Divergence(
            _exp(float(losses.mean())),
            _exp(float(others.mean())),
            float(kl.mean()),
            float(np.quantile(kl.numpy(), 0.99)),
            float(agree.mean()),
            len(kl),
        )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < _LARGEST else math.inf


def _compare(source: Tensor, converted: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Per position, float64: loss of both, KL(source || converted), and 1 where both agree."""
    rows = []
    for start in range(0, len(source), _ROWS):
        cut = slice(start, start + _ROWS)
        targets = ids[0, 1:][cut, None]
        p, q = (torch.log_softmax(part[cut].double(), dim=1) for part in (source, converted))
        # What the source rules out adds nothing, though 0 * inf would be NaN.
        kl = torch.where(p == -math.inf, 0.0, p.exp() * (p - q)).sum(dim=1)
        agree = (p.argmax(dim=1) == q.argmax(dim=1)).double()
        losses = (-part.gather(1, targets)[:, 0] for part in (p, q))
        rows.append((*losses, kl, agree))
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


class LayerDrift(Struct, frozen=True):
    """Distance of a layer's outputs, over all tokens.

    `relative_error` is ||a - b|| / ||a||, in which the few tokens with huge values that many models
    have weigh most; `token_error` is the mean of every token's own. `cosine` is of all tokens.
    """

    layer: int
    relative_error: float
    token_error: float
    cosine: float


class Drift:
    """Sums in float64 over the hidden states behind each layer."""

    def __init__(self) -> None:
        # ||a||^2, ||b||^2, a.b, ||a - b||^2, every token's relative error, number of tokens
        self._sums: dict[int, Tensor] = {}

    def add(self, layer: int, source: Tensor, converted: Tensor) -> None:
        """The hidden states [..., H] of a window behind a layer, of both models."""
        for a, b in zip(_pieces(source), _pieces(converted), strict=True):
            norm, apart = (a * a).sum(dim=1), ((a - b) ** 2).sum(dim=1)
            # A token of zeros is 0 apart from zeros, and infinitely far from others.
            error = torch.where(apart == 0, 0.0, (apart / norm).sqrt())
            each = norm, (b * b).sum(dim=1), (a * b).sum(dim=1), apart, error, torch.ones_like(norm)
            found = torch.stack([one.sum() for one in each])
            self._sums[layer] = self._sums.get(layer, 0) + found

    def result(self) -> list[LayerDrift]:
        """Drift by layer, ascending."""
        return [_drift(layer, *sums.tolist()) for layer, sums in sorted(self._sums.items())]

    def state(self) -> Mapping[str, Array]:
        """Arrays from which `restore` goes on."""
        layers = sorted(self._sums)
        sums = [self._sums[layer].numpy() for layer in layers]
        return {
            "layers": np.array(layers, np.int64),
            "sums": np.array(sums, np.float64).reshape(len(layers), _SUMS),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """The sums of an earlier `state`, in place of those that there are."""
        pairs = zip(state["layers"].tolist(), state["sums"], strict=True)
        self._sums = {layer: torch.tensor(sums) for layer, sums in pairs}


def _pieces(hidden: Tensor) -> Iterator[Tensor]:
    """Some rows at a time, as float64 [N, H] on the CPU."""
    for rows in torch.split(hidden.reshape(-1, hidden.shape[-1]), _ROWS):
        yield rows.cpu().double()


def _drift(
    layer: int, a: float, b: float, ab: float, apart: float, errors: float, tokens: float
) -> LayerDrift:
    if apart == 0:
        return LayerDrift(layer, 0.0, 0.0, 1.0)
    error = math.sqrt(apart / a) if a else math.inf
    cosine = ab / math.sqrt(a * b) if a and b else 0.0
    return LayerDrift(layer, error, errors / tokens, cosine)


class Comparison:
    """The `Watcher` of a pass with two sides that tells how far they are apart."""

    def __init__(self, windows: Sequence[Tensor]) -> None:
        """`windows` [1, T]: of the pass."""
        self.drift, self.predictions = Drift(), Predictions(windows)

    def layer(self, index: int, window: int, values: Sequence[Any]) -> None:
        """Compare the values that a layer returns, by side."""
        self.drift.add(index, *map(first_tensor, values))

    def logits(self, window: int, logits: Sequence[Tensor]) -> None:
        """[1, T, V], by side."""
        self.predictions.add(window, logits)

    def state(self) -> Mapping[str, Array]:
        """State of the drift: all logits come in one go, at the end."""
        return self.drift.state()

    def restore(self, state: Mapping[str, Array]) -> None:
        """An earlier `state`."""
        self.drift.restore(state)
