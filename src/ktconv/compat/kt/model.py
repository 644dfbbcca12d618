"""The layers of one model: what they hand to one another, and the checkpoint they come from."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

from ktconv.compat.kt.calls import Deferred
from ktconv.errors import UsageError
from ktconv.runtime.sources import Source, opened
from ktconv.system.units import counted


class Model:
    """Wrappers of the same weight_path and hidden size, each with a layer of its own.

    A wrapper whose layer is there already belongs to another model, as the same weights may be
    loaded twice. Models know their wrappers weakly, and end with the last of them.
    """

    def __init__(self) -> None:
        self._layers: WeakValueDictionary[int, object] = WeakValueDictionary()
        self._pending: Deferred | None = None
        self._source: Source | None = None
        self._lock = threading.Lock()

    def add(self, layer_idx: int, wrapper: object) -> bool:
        """Whether `wrapper` has become the one of that layer, which had none."""
        with self._lock:
            return self._layers.setdefault(layer_idx, wrapper) is wrapper

    def after(self, layer_idx: int) -> int | None:
        """The next layer; None of the last one."""
        return min((n for n in list(self._layers) if n > layer_idx), default=None)

    def source(self, weight_path: str) -> Source:
        """Open `weight_path`, once: a converted model, or a checkpoint. UsageError where it is
        empty, which would be the working directory."""
        if not weight_path:
            raise UsageError("weight_path is empty", "name what has the weights, or pack tensors")
        with self._lock:
            if self._source is None:
                self._source = opened(Path(weight_path))
            return self._source

    def leave(self, deferred: Deferred | None) -> None:
        """Leave deferred work to the layer that is called next."""
        with self._lock:
            self._pending = deferred

    def take(self, layer_idx: int, tokens: int) -> Deferred | None:
        """Take the work that was left to layer `layer_idx`; nothing is left then.

        UsageError where it was left to another layer or with other tokens, as no sum would have it,
        unless its computation has failed anyway.
        """
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is None or (pending.consumer, pending.tokens) == (layer_idx, tokens):
            return pending
        if pending.sum.failed():
            return None  # so the caller was told, and begins again
        raise UsageError(
            f"layer {pending.producer} deferred experts of {counted(pending.tokens, 'token')} to "
            "layer "
            f"{pending.consumer}, but layer {layer_idx} is called, with {counted(tokens, 'token')}",
            "call layers in order and with the same tokens, or without "
            "max_deferred_experts_per_token; if that pass was given up, just begin another",
        )


_models: WeakValueDictionary[tuple[str, int, int], Model] = WeakValueDictionary()
_lock = threading.Lock()


def join(weight_path: str, hidden: int, layer_idx: int, wrapper: object) -> Model:
    """The first model of this path and size that does not have the layer yet."""
    with _lock:
        for number in count():
            model = _models.setdefault((weight_path, hidden, number), Model())
            if model.add(layer_idx, wrapper):
                return model
    raise AssertionError  # numbers do not end


def forget_deferred() -> None:
    """Drops what any layer has left to another one."""
    for model in list(_models.values()):
        model.leave(None)
