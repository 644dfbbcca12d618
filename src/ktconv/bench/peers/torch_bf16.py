"""torch: a loop over the experts that have tokens, with bf16 linear layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ktconv.bench.measure import Batch
from ktconv.bench.peers.base import Layer, PeerError, Steps, is_plain
from ktconv.formats.decode import f32_to_bf16
from ktconv.runtime.layers.experts import GatedMatrices
from ktconv.system.arrays import F32, Array

Weights = tuple[Tensor, Tensor, Tensor]


class TorchBf16:
    """bf16 weights and activations, float32 sums of experts."""

    def prepare(self, layer: Layer) -> None:
        if not is_plain(layer.shape.activation):
            raise PeerError("only plain SwiGLU is compared")
        torch.set_num_threads(layer.threads)
        self._layer = layer
        kept = {origin: self._bf16(origin) for origin in set(layer.origins)}
        self._experts = [_copy(kept[origin]) for origin in layer.origins]

    def _bf16(self, origin: int) -> Weights:
        gate, up, down = (_tensor(f32_to_bf16(m)) for m in self._layer.source(origin))
        return gate, up, down

    def expert_bytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._experts[0])

    def values(self, origin: int) -> GatedMatrices:
        gate, up, down = self._layer.source(origin)  # exact in bf16
        return gate, up, down

    def steps(self, batch: Batch) -> Steps:
        x, weights = _tensor(batch.x), torch.from_numpy(batch.weights)
        y = torch.empty(x.shape, dtype=torch.bfloat16)

        def step(ids: Tensor) -> Callable[[], None]:
            def call() -> None:
                with torch.inference_mode():
                    y.copy_(self._forward(x, ids, weights))

            return call

        def result() -> F32:
            values: F32 = y.float().numpy()
            return values

        return Steps([step(torch.from_numpy(ids)) for ids in batch.ids], result)

    def _forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Pairs sorted by expert; each expert's tokens gathered, computed, added."""
        y = torch.zeros(x.shape, dtype=torch.float32)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
        tokens = order // ids.shape[1]
        scale = weights.reshape(-1)[order, None]
        start = 0
        for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
            chosen = slice(start, start + count)
            start += count
            if expert < 0:
                continue
            gate, up, down = self._experts[expert]
            rows = x[tokens[chosen]]
            out = linear(silu(linear(rows, gate)) * linear(rows, up), down)
            y.index_add_(0, tokens[chosen], out * scale[chosen])
        return y

    def close(self) -> None:
        self._experts = []


def _tensor(bits: Array) -> Tensor:
    """bf16 bits as a tensor on the same memory."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _copy(weights: Weights) -> Weights:
    gate, up, down = (matrix.clone() for matrix in weights)
    return gate, up, down
