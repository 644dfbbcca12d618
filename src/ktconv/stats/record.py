"""Reads a text with a model of transformers and counts which experts its routers choose."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from ktconv.errors import CheckpointError, UsageError
from ktconv.model.load import context_length
from ktconv.stats.counts import NUM_LAYERS, LayerCounts, Statistics
from ktconv.system.arrays import I32, I64
from ktconv.system.text import Notify, path_text, silent
from ktconv.system.units import format_duration

if TYPE_CHECKING:
    from ktconv.model.module import Routing

WINDOW = 512  # tokens that the model reads at a time; each window starts anew
_WINDOWS = 8  # that are read at once where reading the weights costs more than they do
_NOTIFY_SECONDS = 5.0


@dataclass(slots=True)
class _Layer:
    """What is counted in a layer while the model reads."""

    counts: I64
    tokens: int = 0
    ids: list[I32] = field(default_factory=list)


class Recorder:
    """A loaded model with counters on the experts of its layers. `config`: see `load_model`.

    Memory is that of the loaded model; a window at a time goes through it, without its head. With
    `max_memory` the weights beyond so many bytes stay in a temporary folder, one layer at a time
    is read from there, and a few windows at once go through it. Raises ResourceError before
    loading where the model does not fit, CheckpointError where transformers cannot load it or
    finds no experts in it, UsageError without transformers.
    """

    def __init__(
        self, model: Path, max_memory: int | None = None, config: Path | None = None
    ) -> None:
        from ktconv.model import load_model
        from ktconv.model.sites import find_experts

        self._folder = TemporaryDirectory(prefix="ktconv-") if max_memory is not None else None
        self._windows = 1 if self._folder is None else _WINDOWS
        self._model, self._tokenizer = load_model(
            model,
            config_directory=config,
            max_memory=max_memory,
            offload=Path(self._folder.name) if self._folder else None,
        )
        self._sites = find_experts(self._model)
        self.about = {
            "model": path_text(model),
            "model_type": getattr(self._model.config, "model_type", None),
            NUM_LAYERS: getattr(self._model.config.get_text_config(), NUM_LAYERS, None),
        }

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def experts(self) -> dict[int, int]:
        """Number of experts by layer."""
        return {layer: site.count for layer, site in sorted(self._sites.items())}

    def read(
        self, pieces: Iterable[str], max_tokens: int, notify: Notify = silent, *, keep: bool = False
    ) -> tuple[Statistics, dict[int, I32]]:
        """Counts over the first `max_tokens` tokens of a text that comes in pieces.

        With `keep` also the chosen ids [tokens, top-k] of each layer, in the order of the text.
        Raises UsageError for a text without tokens.
        """
        import torch

        from ktconv.model.sites import experts_watched

        found = {layer: _Layer(np.zeros(n, np.int64)) for layer, n in self.experts.items()}
        length = context_length(self._model, WINDOW)
        progress, tokens = _Progress(max_tokens, notify), 0

        def count(layer: int, routing: Routing) -> None:
            about, experts = found[layer], len(found[layer].counts)
            ids = _chosen(routing, experts)
            about.counts += np.bincount(ids[ids >= 0], minlength=experts)
            about.tokens += len(ids)
            if keep:
                about.ids.append(ids)

        with experts_watched(self._sites, count), torch.inference_mode():
            windows = token_windows(self._tokenizer, pieces, length, max_tokens)
            for batch in _batches(windows, self._windows):
                # The logits are not needed, and can be larger than all else that is computed.
                self._model.base_model(input_ids=torch.tensor(batch), use_cache=False)
                tokens += sum(map(len, batch))
                progress.update(tokens)
        if not tokens:
            raise UsageError("the text contains no tokens", "use a longer text")
        for layer, counted in found.items():
            if not counted.counts.any():
                raise CheckpointError(f"the model did not call layer {layer}'s experts")
        layers = [LayerCounts(n, counted.tokens, counted.counts) for n, counted in found.items()]
        ids = {n: np.concatenate(counted.ids) for n, counted in found.items()} if keep else {}
        return Statistics(layers, self.about | {"tokens": tokens}), ids


def _chosen(routing: Routing, experts: int) -> I32:
    """Chosen experts [M, K] of a call; -1 where a token chose fewer, or one without matrices, as
    LongCat's that return their input and Zaya's that does nothing (some expert with weight 0)."""
    hidden, ids, weights = routing
    if hidden is not None:
        ids = ids.reshape(hidden.numel() // hidden.shape[-1], -1)
    found: I32 = ids.cpu().numpy().astype(np.int32)  # a copy
    found[(found < 0) | (found >= experts)] = -1
    if weights is not None:
        found[(weights.reshape(found.shape) == 0).cpu().numpy()] = -1
    return found


# ---- text ------------------------------------------------------------------------------


def token_windows(
    tokenizer: Any, pieces: Iterable[str], length: int, limit: int
) -> Iterator[list[int]]:
    """Runs of `length` tokens without gap or overlap, `limit` in all; the last is shorter."""
    kept: list[int] = []
    for piece in pieces:
        kept += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        kept = kept[:limit]
        whole = len(kept) // length * length
        for start in range(0, whole, length):
            yield kept[start : start + length]
        kept, limit = kept[whole:], limit - whole
        if len(kept) == limit:
            break
    if kept:
        yield kept


def _batches(windows: Iterable[list[int]], most: int) -> Iterator[list[list[int]]]:
    """Up to `most` consecutive windows of one length."""
    batch: list[list[int]] = []
    for window in windows:
        if len(batch) == most or (batch and len(batch[0]) != len(window)):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


class _Progress:
    """A line every few seconds."""

    def __init__(self, total: int, notify: Notify) -> None:
        self._total, self._notify = total, notify
        self._started = self._notified = time.monotonic()

    def update(self, tokens: int) -> None:
        now = time.monotonic()
        if now - self._notified < _NOTIFY_SECONDS:
            return
        self._notified = now
        left = (now - self._started) / tokens * (self._total - tokens)
        self._notify(f"{tokens} of at most {self._total} tokens, ETA {format_duration(left)}")
