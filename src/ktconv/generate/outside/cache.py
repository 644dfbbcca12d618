"""Keys and values of tokens, in memory that has room for those to come."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values that grow in place, where DynamicLayer copies itself for each token: the
    first `count` of `memory`, two tensors [B, heads, room, cols]."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.count, self.memory = keys.shape[2], (keys, values)
        self.reserve(max(tokens, self.count))

    @property
    def room(self) -> int:
        """Tokens that memory has room for."""
        return self.memory[0].shape[2]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens."""
        keys, values = (_larger(one[:, :, : self.count], tokens) for one in self.memory)
        self.memory = keys, values
        self.extend(self.count)

    def extend(self, tokens: int) -> None:
        """Count the first `tokens` tokens of memory, which were written there."""
        keys, values = self.memory
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]
        self.count = tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them."""
        after = self.count + key_states.shape[2]
        if after > self.room:
            self.reserve(2 * after)
        for memory, new in zip(self.memory, (key_states, value_states), strict=True):
            memory[:, :, self.count : after] = new
        self.extend(after)
        return self.memory[0][:, :, :after], self.memory[1][:, :, :after]


def _larger(tensor: Tensor, tokens: int) -> Tensor:
    found = tensor.new_empty((*tensor.shape[:2], tokens, tensor.shape[3]))
    found[:, :, : tensor.shape[2]] = tensor
    return found


def with_room(cache: Any, tokens: int) -> None:
    """Give layers of a cache of transformers that keep all tokens memory for `tokens` of them."""
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            continue
        if layer.keys.dim() == layer.values.dim() == 4:
            cache.layers[number] = GrowingLayer(layer.keys, layer.values, tokens)
