"""Layers that config.json makes dense, by the first of these ways that it has keys of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from ktconv.families import table


class DenseLayers(Struct, frozen=True):
    """Layers that config.json makes dense, by each key that does; all others are MoE."""

    by_key: Mapping[str, Callable[[int], bool]]

    def key_of(self, index: int) -> str | None:
        """The key that makes layer `index` dense; None for an MoE layer."""
        return next((key for key, is_dense in self.by_key.items() if is_dense(index)), None)


def dense_layers(text: Mapping[str, Any]) -> DenseLayers | None:
    """Dense layers by the first rule whose keys the text section has; None where it has none of
    them."""
    for rule in (
        _by_kinds,
        _by_blocks,
        _by_list,
        _by_range,
        _by_leading_dense,
        _by_period,
        _by_step,
        _by_sparse_step,
    ):
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


def _by_blocks(text: Mapping[str, Any]) -> DenseLayers | None:
    """layers_block_type: ["mamba", "moe", ...], or hybrid_override_pattern: "ME*E" (Nemotron).
    Without an MoE layer it says something else, such as which layers have attention."""
    for key in table.FAMILIES.keys("kind of each block"):
        kinds = text.get(key)
        if isinstance(kinds, (str, list)):
            listed = [i for i, kind in enumerate(kinds) if kind in ("moe", "E")]
            if listed:
                return _all_but(key, listed)
    return None


def _by_list(text: Mapping[str, Any]) -> DenseLayers | None:
    """moe_layers: [1, 3, 5] (Llama 4), or moe_layers_enum: "1,3,5" (Step)."""
    key, layers = _given(text, "MoE layers")
    if isinstance(layers, list):
        return _all_but(key, layers)
    key, layers = _given(text, "MoE layers in a text")
    return _all_but(key, numbers_in(layers)) if isinstance(layers, str) else None


def numbers_in(listed: str) -> list[int]:
    """ "3,4,5" -> [3, 4, 5]; ValueError for anything else."""
    return [int(one) for one in listed.split(",")] if listed.strip() else []


def _by_range(text: Mapping[str, Any]) -> DenseLayers | None:
    """moe_layer_start_index, moe_layer_end_index (-1: the last) and moe_layer_interval, counted
    from 1 (Ernie). One that is for the text and for the vision model has a number for each."""
    start_key, starts = _given(text, "first MoE layer")
    end_key, ends = _given(text, "last MoE layer")
    interval_key, interval = _given(text, "MoE interval")
    if starts is None and ends is None and interval is None:
        return None
    start = min(starts if isinstance(starts, list) else [starts or 0])
    last = ends if isinstance(ends, list) else [-1 if ends is None else ends]
    end = None if min(last) < 0 else max(last)
    step = interval or 1
    return DenseLayers(
        {
            start_key: lambda i: i < start,
            end_key: lambda i: end is not None and i > end,
            interval_key: lambda i: (i + 1) % step != 0,
        }
    )


def _by_period(text: Mapping[str, Any]) -> DenseLayers | None:
    """expert_layer_period and expert_layer_offset (Jamba)."""
    period_key, period = _given(text, "MoE period")
    _, offset = _given(text, "MoE offset")
    if type(period) is not int or period < 1:
        return None
    first = (offset or 0) % period
    return DenseLayers({period_key: lambda i: i % period != first})


def _by_step(text: Mapping[str, Any]) -> DenseLayers | None:
    """interleave_moe_layer_step: every n-th layer, counted from 1 (Llama 4)."""
    key, step = _given(text, "MoE step")
    if type(step) is not int or step < 1:
        return None
    return DenseLayers({key: lambda i: (i + 1) % step != 0})


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
