"""Keys and values of tokens, in memory that has room for those to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

# The word by which models and their layers take a cache, and models give it. Transformers 5.24
# made it a new one: models still know the old one and warn, layers are called with the new one.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values that grow in place, where DynamicLayer copies itself for each token: the
    first `count` of `memory`, two tensors [B, heads, room, cols] at the addresses `places`. Where
    the layer `fits`, a kernel can write behind them; who lets it do so adds to `count`."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        # Not that of DynamicLayer, which would set keys and values.
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.count, self.memory = keys.shape[2], (keys, values)
        self.reserve(max(tokens, self.count))

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """Keys of all tokens."""
        return self.memory[0].narrow(2, 0, self.count)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """Values of all tokens."""
        return self.memory[1].narrow(2, 0, self.count)

    def get_seq_length(self) -> int:
        """Tokens that are there."""
        return self.count

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens."""
        keys, values = self.memory = (_larger(self.keys, tokens), _larger(self.values, tokens))
        self.room, self.places = keys.shape[2], (keys.data_ptr(), values.data_ptr())
        self.fits = keys.shape[0] == 1 and keys.dtype is values.dtype is torch.bfloat16

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them."""
        after = self.count + key_states.shape[2]
        if after > self.room:
            self.reserve(2 * after)
        for memory, new in zip(self.memory, (key_states, value_states), strict=True):
            memory[:, :, self.count : after] = new
        self.count = after
        return self.keys, self.values


def _larger(tensor: Tensor, tokens: int) -> Tensor:
    found = tensor.new_empty((*tensor.shape[:2], tokens, tensor.shape[3]))
    found[:, :, : tensor.shape[2]] = tensor
    return found


def growing(cache: Any, number: int) -> GrowingLayer | None:
    """The layer of a cache, with room for a token that a kernel writes; None where it cannot."""
    layer = cache.layers[number] if number < len(cache.layers) else None
    if type(layer) is not GrowingLayer or not layer.fits:
        return None
    if layer.count == layer.room:
        layer.reserve(2 * layer.room)
    return layer


def with_room(cache: Any, tokens: int) -> None:
    """Give layers of a cache of transformers that keep all tokens memory for `tokens` of them."""
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            continue
        if layer.keys.dim() == layer.values.dim() == 4:
            cache.layers[number] = GrowingLayer(layer.keys, layer.values, tokens)
