"""How far a model with other weights in its experts is from the source, on a text.

Everything but the experts is computed in float32, for the source and for what is compared with it,
so that two models of the same weights have a KL divergence of exactly 0. Experts are computed in
two ways: `of_values` puts dequantized weights into the source model, which shows the error of the
weights alone; `of_output` uses the kernels, which also round activations to int8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.accuracy.texts import WINDOW, Text
from ktconv.model import load_model, replace_experts
from ktconv.model.evaluate import windows
from ktconv.model.sites import Site, find_experts
from ktconv.model.streamed.compare import Predictions
from ktconv.source import Projection
from ktconv.system.arrays import F32

LAYER_WINDOWS = 4  # whose tokens the experts of each layer are compared on
Matrices = Mapping[Projection, F32]
Values = Mapping[tuple[int, int], Matrices]  # by layer and expert


@dataclass(frozen=True)
class Found:
    """Perplexities, KL divergences in nats and top-1 agreement, as of `Divergence`.

    `kl_windows` are the means of each window; `layer_errors` ||y - y_source|| / ||y_source|| of the
    routed experts' summed outputs, by layer, on the source's own inputs.
    """

    perplexity_source: float
    perplexity_converted: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    kl_windows: list[float]
    layer_errors: list[float]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


class Evaluation:
    """A source model in float32, its logits on the windows of a text, and `calls`: what the experts
    of each layer got (hidden states, ids, weights) and returned in the first windows."""

    def __init__(self, source: Path, text: Text, limit: int | None = None) -> None:
        """`limit`: on the number of windows."""
        model, tokenizer = load_model(source, "float32")
        self.model: Any = model
        self.windows = windows(tokenizer, text.content, WINDOW, limit)
        self.sites = find_experts(model)
        self.calls: dict[int, list[tuple[tuple[Any, ...], Tensor]]] = {n: [] for n in self.sites}
        self._logits = self._first_pass()
        self._own = {n: [t.clone() for t in site.stored.tensors] for n, site in self.sites.items()}

    @property
    def source(self) -> Values:
        """Views of the experts' weights as they are in the model now."""
        return {
            (layer, expert): {p: m.numpy() for p, m in site.own.matrices(expert).items()}
            for layer, site in self.sites.items()
            for expert in range(site.count)
        }

    def of_values(self, values: Values) -> Found:
        """With these weights in float32; the model has its own again afterwards."""
        for (layer, expert), matrices in values.items():
            for projection, own in self.sites[layer].own.matrices(expert).items():
                own.copy_(torch.from_numpy(matrices[projection]))
        try:
            return self._found()
        finally:
            for layer, tensors in self._own.items():
                for now, own in zip(self.sites[layer].stored.tensors, tensors, strict=True):
                    now.data.copy_(own)

    def of_output(self, output: Path) -> Found:
        """With the experts of a conversion, on the kernels of this machine."""
        with self.on_kernels(output):
            return self._found()

    def on_kernels(self, output: Path) -> AbstractContextManager[Any]:
        """The model has the experts of a conversion meanwhile."""
        return replace_experts(self.model, output, keep=True)

    def _first_pass(self) -> list[Tensor]:
        recorded = self.windows[:LAYER_WINDOWS]
        hooks = [self._recorded(n, site) for n, site in self.sites.items()]
        logits = [self._run(ids) for ids in recorded]
        for hook in hooks:
            hook.remove()
        return logits + [self._run(ids) for ids in self.windows[len(recorded) :]]

    def _recorded(self, layer: int, site: Site) -> Any:
        def keep(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self.calls[layer].append((tuple(one.clone() for one in inputs), output.clone()))

        return site.module.register_forward_hook(keep)

    def _run(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def _found(self) -> Found:
        predictions = Predictions(self.windows)
        for number, ids in enumerate(self.windows):
            predictions.add(number, [self._logits[number], self._run(ids)])
        whole = predictions.result()
        running = [predictions.result(n + 1).kl_mean for n in range(len(self.windows))]
        return Found(
            whole.perplexity_source,
            whole.perplexity_converted,
            whole.kl_mean,
            whole.kl_p99,
            whole.top1_agreement,
            each_of_running_means(running),
            self.layer_errors(),
        )

    def layer_errors(self) -> list[float]:
        """As `Found`, of the experts that the model has now."""
        return [self._layer_error(layer) for layer in sorted(self.sites)]

    def _layer_error(self, layer: int) -> float:
        apart = norm = 0.0
        for inputs, wanted in self.calls[layer]:
            with torch.inference_mode():
                y = self.sites[layer].module(*inputs)
            apart += float((y.double() - wanted.double()).square().sum())
            norm += float(wanted.double().square().sum())
        return math.sqrt(apart / norm)


def each_of_running_means(running: Sequence[float]) -> list[float]:
    """x_1 ... x_n from the means of the first 1 ... n of them."""
    sums = np.asarray(running) * np.arange(1, len(running) + 1)
    return [float(one) for one in np.diff(sums, prepend=0.0)]


def greatest_difference(one: Path, other: Path, text: Path) -> float:
    """Between the logits of two models in float32, on the windows of a text."""
    (first, tokenizer), (second, _) = load_model(one, "float32"), load_model(other, "float32")
    greatest = 0.0
    with torch.inference_mode():
        for ids in windows(tokenizer, text.read_text(encoding="utf-8"), WINDOW):
            a, b = (model(input_ids=ids, use_cache=False).logits for model in (first, second))
            greatest = max(greatest, float((a - b).abs().max()))
    return greatest
