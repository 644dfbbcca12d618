"""Models whose experts are a list of modules, made from one whose experts are in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ktconv.model.sites import find_experts

USUAL = ("gate_proj", "up_proj", "down_proj")


class Expert(nn.Module):
    """With linear layers of these names, and `function` behind the gate."""

    def __init__(
        self,
        matrices: Mapping[Any, Tensor],
        names: tuple[str, ...] = USUAL,
        function: Callable[[Tensor], Tensor] = nn.functional.silu,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.function, self.names = function, names
        for name, matrix in zip(names, matrices.values(), strict=True):
            linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias, dtype=matrix.dtype)
            linear.weight.data.copy_(matrix)
            setattr(self, name, linear)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        y: Tensor = down(self.function(gate(x)) * up(x))
        return y


class Indexed(nn.Module):
    """Calls the experts that some token chose, as most models of transformers 4 do."""

    def __init__(self, gate: nn.Module, experts: nn.ModuleList) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        _, weights, ids = self.gate(rows)
        return self.mixed(rows, ids, weights).reshape(hidden.shape)

    def mixed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(rows)
        for number in torch.unique(ids):
            token, slot = torch.where(ids == number)
            output = self.experts[number](rows[token])
            y.index_add_(0, token, output * weights[token, slot, None])
        return y


class Enumerated(Indexed):
    """Calls all experts in order, also those without a token."""

    def mixed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            y[token] += expert(rows[token]) * weights[token, slot, None]
        return y


class OneByOne(Indexed):
    """Calls an expert for one token at a time, with a shape of one dimension."""

    def mixed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.stack(
            [
                sum(w * self.experts[int(e)](row) for e, w in zip(*chosen, strict=True))
                for row, *chosen in zip(rows, ids, weights, strict=True)
            ]
        )


class CallableList(nn.ModuleList):
    """A list that is called as one module, by names of its own."""

    def forward(self, tokens: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        return Indexed(nn.Identity(), self).mixed(tokens, chosen, scores)


class Whole(Indexed):
    """Calls the list itself."""

    def mixed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self.experts(rows, scores=weights, chosen=ids)
        return y


def with_lists(model: Any, block: type[Indexed] = Indexed, **more: Any) -> Any:
    """The model, with a list in place of each of its modules of experts."""
    kind = CallableList if block is Whole else nn.ModuleList
    for site in find_experts(model).values():
        own = site.own
        listed: Any = [Expert(own.matrices(e), **more) for e in range(own.count)]
        place, _, name = site.path.rpartition(".")[0].rpartition(".")
        gate: Any = site.parent.gate
        setattr(model.get_submodule(place), name, block(gate, kind(listed)))
    return model.eval()
