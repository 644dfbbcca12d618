"""Packed experts for each way in which models call theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.model.module import PackedExperts, Routing
from ktconv.model.own import Call, OwnExperts
from ktconv.runtime.compiled import uncompiled
from ktconv.runtime.staging import on_device


class SortedExperts(PackedExperts):
    """Packed experts of Llama 4, whose block gives each expert all tokens, already times their
    weights.

    Tokens that an expert is not chosen for are zeros and are skipped: without biases an expert's
    output for zeros is zero.
    """

    @uncompiled
    def forward(  # type: ignore[override]
        self, hidden_states: Tensor
    ) -> Tensor:
        """[E * M, H] -> [E * M, H]; the rows of expert e are those from e * M on."""
        (rows,) = self._fetched(hidden_states.reshape(-1, self.experts.hidden))
        count = self.experts.count
        owners = torch.arange(count, device=rows.device).repeat_interleave(len(rows) // count)
        ids = torch.where(rows.detach().any(dim=1), owners, -1)
        return on_device(self._answer(rows, ids, rows.new_ones(len(rows))), hidden_states)

    def _output_of(self, own: OwnExperts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Each row has one id."""
        place = ids[:, 0], torch.arange(len(rows), device=rows.device)
        inputs = rows.new_zeros((own.count, *rows.shape))
        inputs[place] = rows
        y: Tensor = own.module(inputs.reshape(-1, rows.shape[1])).reshape(inputs.shape)
        return y[place]

    @staticmethod
    def routing(module: Any, arguments: Sequence[Any]) -> Routing:
        (hidden,) = arguments
        count = module.experts.count if isinstance(module, PackedExperts) else len(module.down_proj)
        chosen = hidden.reshape(count, -1, hidden.shape[-1]).any(dim=2).T
        top_k = int(chosen.sum(dim=1).max())
        order = (~chosen).int().argsort(dim=1, stable=True)[:, :top_k]
        return Routing(None, torch.where(chosen.gather(1, order), order, -1), None)


class _ByMatrices(PackedExperts):
    """Packed experts of modules that cannot be called with ids: they run matrix by matrix."""

    def _output_of(self, own: OwnExperts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(rows)
        for expert in torch.unique(ids[ids >= 0]).tolist():
            token, slot = torch.where(ids == expert)
            output = self._output_of_one(own, expert, rows[token])
            y.index_add_(0, token, output * weights[token, slot, None].to(y.dtype))
        return y

    def _output_of_one(self, own: OwnExperts, expert: int, rows: Tensor) -> Tensor:
        linear = nn.functional.linear
        function: Any = getattr(own.module, "activation", nn.functional.silu)
        gate, up, down = own.matrices(expert).values()
        return linear(function(linear(rows, gate)) * linear(rows, up), down)


class LogitsExperts(_ByMatrices):
    """Packed experts of Aria, which choose by the router's logits themselves."""

    def _adopt(self, own: OwnExperts) -> None:
        self.config = own.module.config
        kind: Any = type(own.module)
        self._route = kind.route_tokens_to_experts

    def route_tokens_to_experts(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights, by the code of the model."""
        found: tuple[Tensor, Tensor] = self._route(self, router_logits)
        return found

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, router_logits: Tensor
    ) -> Tensor:
        """[M, H] of hidden_states [M, H] and router_logits [M, E]."""
        return super().forward(hidden_states, *self.route_tokens_to_experts(router_logits))

    @staticmethod
    def routing(module: Any, arguments: Sequence[Any]) -> Routing:
        hidden, logits = arguments
        return Routing(hidden, *module.route_tokens_to_experts(logits))


class ExpertsBlock(_ByMatrices):
    """Packed experts of JetMoE, part of the module that has their router and a bias."""

    def _adopt(self, own: OwnExperts) -> None:
        block: Any = own.module
        self.router, self.bias = block.router, block.bias

    def forward(  # type: ignore[override]
        self, layer_input: Tensor
    ) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        _, ids, weights = self.routing(self, (layer_input,))
        assert weights is not None
        y: Tensor = super().forward(layer_input, ids, weights) + self.bias
        return y

    @staticmethod
    def routing(module: Any, arguments: Sequence[Any]) -> Routing:
        (hidden,) = arguments
        rows = hidden.reshape(-1, hidden.shape[-1])
        _, token, weights, sizes, _ = module.router(rows)
        order = token.argsort(stable=True)  # the router sorts by expert
        numbers = torch.arange(len(sizes), device=order.device)
        experts = numbers.repeat_interleave(torch.tensor(sizes, device=order.device))
        shape = (len(rows), -1)
        return Routing(hidden, experts[order].reshape(shape), weights[order].reshape(shape))


class EachExperts(_ByMatrices, nn.ModuleList):
    """Packed experts in a list of modules, each of which the block calls with its tokens: it calls
    the elements of this one. Elements that return their input stay as they are."""

    def _adopt(self, own: OwnExperts) -> None:
        self.extend(ListElement(self, number) for number in range(self.experts.count))
        self.extend(nn.Identity() for _ in range(self._identities))

    def __len__(self) -> int:
        """Number of elements, next to which LoRA is a part of the module."""
        return sum(name.isdecimal() for name in self._modules)

    def __iter__(self) -> Iterator[Any]:
        return (self._modules[str(number)] for number in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """An element, or a plain list of some."""
        if isinstance(index, slice):
            return nn.ModuleList(list(self)[index])
        return super().__getitem__(index)

    def _output_of_one(self, own: OwnExperts, expert: int, rows: Tensor) -> Tensor:
        module: Any = own.module
        y: Tensor = module[expert](rows)
        return y

    @staticmethod
    def routing(module: Any, arguments: Sequence[Any]) -> Routing:
        raise UsageError("experts that are called one by one do not see how tokens are routed")


class ListElement(nn.Module):
    """An element of EachExperts."""

    def __init__(self, owner: EachExperts, number: int) -> None:
        super().__init__()
        self._owner, self.number = (owner,), number  # not as a part, which the list is not

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H] of this expert, in the dtype and on the device of the input."""
        tokens = hidden_states.numel() // max(1, hidden_states.shape[-1])
        ids = torch.full((tokens, 1), self.number, device="cpu")
        y: Tensor = self._owner[0](hidden_states, ids, torch.ones(ids.shape, device="cpu"))
        return y

    def extra_repr(self) -> str:
        return f"expert {self.number}"


_CLASSES: Mapping[Call, type[PackedExperts]] = {
    "routed": PackedExperts,
    "sorted": SortedExperts,
    "logits": LogitsExperts,
    "block": ExpertsBlock,
    "each": EachExperts,
}


def packed_class(own: OwnExperts) -> type[PackedExperts]:
    """The class whose objects are called as `own` is; CheckpointError where that is not known."""
    if own.call is None:
        raise CheckpointError(
            f"{type(own.module).__name__} is called in a way that is not known",
        )
    return _CLASSES[own.call]
