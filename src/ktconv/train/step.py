"""One forward and backward of a layer with LoRA, with the results that can be compared."""

from __future__ import annotations

import torch
from torch import Tensor

from ktconv.runtime import MoELayer
from ktconv.train.function import Setting
from ktconv.train.gradients import MATRICES, Call, Found, matrices_of
from ktconv.train.lora import LoRAExperts


class Step:
    """A `LoRAExperts` with the matrices of `call`, in bf16 as they are there. `saved_bytes`: what a
    forward keeps for its backward; `scratch_bytes`: working memory of either."""

    def __init__(self, layer: MoELayer, call: Call) -> None:
        self._x = call.x.clone().requires_grad_()
        self._weights = call.weights.clone().requires_grad_()
        self._dy, scale = call.dy, call.lora.scale
        given = matrices_of(call.lora)
        rank = given["up_a"].shape[1]
        self._experts = LoRAExperts(layer, rank, scale * rank, dtype=torch.bfloat16)
        self._parameters = dict(self._experts.named_parameters())
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(given[name])
        setting = Setting(layer, tuple(self._parameters), rank, scale)
        sizes = setting.training(list(self._parameters.values()))
        self.saved_bytes: int | None = sizes.saved_size(*call.ids.shape)
        self.scratch_bytes: int | None = sizes.scratch_size(*call.ids.shape)

    def forward(self, ids: Tensor) -> None:
        """Begin the forward of the call with these ids."""
        self._y = self._experts(self._x, ids, self._weights)

    def backward(self) -> None:
        """Begin the backward of the last forward."""
        leaves = [self._x, self._weights, *self._parameters.values()]
        self._gradients = torch.autograd.grad(self._y, leaves, self._dy)

    def found(self) -> Found:
        """Result and gradients of the last forward and backward, by gradients.NAMES."""
        dx, dw, *lora = self._gradients
        matrices = dict(zip(self._parameters, lora, strict=True))
        in_order = {name: matrices[name] for name in MATRICES if name in matrices}
        return {"y": self._y.detach(), "dx": dx, "dw": dw, **in_order}
