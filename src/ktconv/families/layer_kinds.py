"""Which layers config.json makes dense, by one of the ways in which families say that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ktconv.families import table


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """Which layers config.json makes dense, by each key that does; all others are MoE."""

    by_key: Mapping[str, Callable[[int], bool]]

    def key_of(self, index: int) -> str | None:
        """The key that makes layer `index` dense; None for an MoE layer."""
        return next((key for key, is_dense in self.by_key.items() if is_dense(index)), None)


def dense_layers(text: Mapping[str, Any]) -> DenseLayers | None:
    """By the first rule whose keys the text section has; None where it has none of them."""
    for rule in (_by_kinds, _by_list, _by_leading_dense, _by_sparse_step):
        layers = rule(text)
        if layers is not None:
            return layers
    return None


def _given(text: Mapping[str, Any], setting: str) -> tuple[str, Any]:
    """The key that the text section has, else the usual one; and its value."""
    keys = table.FAMILIES.keys(setting)
    key = next((key for key in keys if key in text), keys[0])
    return key, text.get(key)


def _by_kinds(text: Mapping[str, Any]) -> DenseLayers | None:
    """mlp_layer_types: ["dense", "sparse", ...]."""
    key, kinds = _given(text, "kind of each layer")
    if not isinstance(kinds, list):
        return None
    return _all_but(key, (i for i, kind in enumerate(kinds) if kind != "dense"))


def _by_list(text: Mapping[str, Any]) -> DenseLayers | None:
    """moe_layers: [1, 3, 5] (Llama 4)."""
    key, layers = _given(text, "MoE layers")
    return _all_but(key, layers) if isinstance(layers, list) else None


def _by_leading_dense(text: Mapping[str, Any]) -> DenseLayers | None:
    """first_k_dense_replace and moe_layer_freq: an interval, or a 0/1 per layer (DeepSeek)."""
    interval_key, interval = _given(text, "MoE frequency")
    if isinstance(interval, list):
        return _all_but(interval_key, (i for i, moe in enumerate(interval) if moe))
    key, first = _given(text, "leading dense layers")
    if type(first) is not int and type(interval) is not int:
        return None
    first = first if type(first) is int else 0
    step = interval if type(interval) is int and interval > 0 else 1
    return DenseLayers({key: lambda i: i < first, interval_key: lambda i: i % step != 0})


def _by_sparse_step(text: Mapping[str, Any]) -> DenseLayers | None:
    """decoder_sparse_step: every n-th layer, counted from 1, less mlp_only_layers (Qwen)."""
    step_key, step = _given(text, "sparse step")
    dense_key, dense = _given(text, "dense layers")
    if type(step) is not int and not isinstance(dense, list):
        return None
    step = step if type(step) is int and step > 0 else 1
    listed = {i for i in dense if type(i) is int} if isinstance(dense, list) else set()
    return DenseLayers({dense_key: listed.__contains__, step_key: lambda i: (i + 1) % step != 0})


def _all_but(key: str, moe_layers: Iterable[int]) -> DenseLayers:
    listed = frozenset(moe_layers)
    return DenseLayers({key: lambda index: index not in listed})
