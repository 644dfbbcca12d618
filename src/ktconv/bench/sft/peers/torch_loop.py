"""torch: a loop over the experts that have tokens, with bf16 products and autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ktconv.formats.decode import f32_to_bf16
from ktconv.runtime.layers.experts import GatedMatrices
from ktconv.train.gradients import MATRICES, Call, Found, from_bits, matrices_of


class TorchLoop:
    """Each expert's tokens gathered, computed and added: LoRA's second product adds to the base's
    in place (addmm), routings are sorted once, sums of experts are fp32."""

    scratch_bytes: int | None = None

    def __init__(self, experts: Sequence[GatedMatrices], call: Call) -> None:
        self._experts = [tuple(from_bits(f32_to_bf16(m)) for m in one) for one in experts]
        self._x = call.x.clone().requires_grad_()
        self._weights = call.weights.clone().requires_grad_()
        matrices = matrices_of(call.lora).values()
        self._lora = [
            [matrix[expert].clone().requires_grad_() for matrix in matrices]
            for expert in range(len(experts))
        ]
        self._scale, self._dy = call.lora.scale, call.dy
        self._gradients: tuple[Tensor | None, ...] = ()
        self.saved_bytes: int | None = None

    def forward(self, ids: Tensor) -> None:
        if self.saved_bytes is None:
            self._y, self.saved_bytes = saved_by(lambda: self._result(ids), self._own())
        else:
            self._y = self._result(ids)

    def _own(self) -> list[Tensor]:
        """Inputs and weights."""
        of_experts = (matrix for one in (*self._experts, *self._lora) for matrix in one)
        return [self._x, self._weights, *of_experts]

    def _result(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
        token, sizes = order // ids.shape[1], counts.tolist()
        weights = self._weights.reshape(-1, 1)
        y = torch.zeros(self._x.shape, dtype=torch.float32)
        of_expert = torch.split(token, sizes), torch.split(order, sizes)
        pieces = zip(numbers.tolist(), *of_expert, strict=True)
        for expert, tokens, slots in pieces:
            if expert >= 0:
                out = self._expert(expert, self._x[tokens])
                y.index_add_(0, tokens, out * weights[slots])
        return y.bfloat16()

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up, down = self._experts[expert]
        gate_a, gate_b, up_a, up_b, down_a, down_b = self._lora[expert]
        g = self._product(x, gate, gate_a, gate_b)
        middle = silu(g) * self._product(x, up, up_a, up_b)
        return self._product(middle, down, down_a, down_b)

    def _product(self, x: Tensor, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(linear(x, base), linear(x, a), b.t(), alpha=self._scale)

    def backward(self) -> None:
        leaves = [self._x, self._weights, *(matrix for own in self._lora for matrix in own)]
        self._gradients = torch.autograd.grad(self._y, leaves, self._dy, allow_unused=True)

    def found(self) -> Found:
        dx, dw, *lora = self._gradients
        assert dx is not None and dw is not None
        found = {"y": self._y.detach(), "dx": dx, "dw": dw}
        for index, name in enumerate(MATRICES):
            pairs = zip(lora[index::6], (own[index] for own in self._lora), strict=True)
            each = [torch.zeros_like(leaf) if one is None else one for one, leaf in pairs]
            found[name] = torch.stack(each)
        return found


def saved_by(forward: Callable[[], Tensor], given: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Result of a forward, and the bytes that autograd keeps for the backward beyond those of
    `given`."""
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = forward()
    known = {one.untyped_storage().data_ptr() for one in given}
    return y, sum(size for place, size in kept.items() if place not in known)
