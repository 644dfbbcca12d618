"""Experts modules of transformers models that run on the C kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.model.stored import Call, StoredExperts
from ktconv.moe import Experts
from ktconv.system.pool import Pool

_NORMED_AT_ONCE = 1024  # tokens; each of their experts' outputs is in memory for the norm


class Routing(NamedTuple):
    """Which experts a call chooses: ids [M, K], -1 for none. `hidden` [..., H] and `weights` [M, K]
    are None where the module gets only their products."""

    hidden: Tensor | None
    ids: Tensor
    weights: Tensor | None


class PackedExperts(nn.Module):
    """Takes the place of a module with all experts of a layer; has no parameters of experts.

    Without a pool it uses the process's own, so that it works in a child process too. `own` is
    what was there before: experts that are not among the packed ones run on it, or are skipped
    without it, and a norm of the experts' outputs stays in the model's tree.
    """

    def __init__(
        self, experts: Experts, pool: Pool | None = None, own: StoredExperts | None = None
    ) -> None:
        super().__init__()
        self.experts, self.pool = experts, pool
        self._elsewhere = torch.from_numpy(experts.origins < 0)
        self._identities = own.identities if own else 0
        self.post_expert_norm = own.norm if own else None
        self._own = (own,) if own is not None and bool(self._elsewhere.any()) else ()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Like transformers' experts: [..., H] -> [..., H], in the dtype and shape of the input.

        top_k_index and top_k_weights are [M, K], or any shape with M * K elements, M the number
        of tokens. Experts below 0 or from the number of experts on are skipped, except those of
        the model whose outputs are their inputs. Raises UsageError where an input needs a gradient
        or is not on the CPU.
        """
        self._check(hidden_states, top_k_weights)
        rows = hidden_states.reshape(-1, self.experts.hidden)
        if not rows.numel() or not top_k_index.numel():
            return torch.zeros_like(hidden_states)
        ids = top_k_index.reshape(len(rows), -1).to(torch.int64)
        weights = top_k_weights.reshape(len(rows), -1)
        number = self.experts.count
        same = (ids >= number) & (ids < number + self._identities)
        chosen = torch.where((ids < 0) | (ids >= number), -1, ids)
        there = (chosen >= 0) & self._elsewhere.to(chosen.device)[chosen]
        y = self.summed(rows, torch.where(there, -1, chosen), weights).to(hidden_states.dtype)
        for expert in torch.unique(ids[same]).tolist():  # added up as the model's own module does
            token, slot = torch.where(ids == expert)
            weighted = rows[token] * weights[token, slot, None]
            y.index_add_(0, token, weighted.to(y.dtype))
        for own in self._own:
            tokens = there.any(dim=1)
            if tokens.any():
                ids = torch.where(there, ids, -1)[tokens]
                y[tokens] += self._output_of(own, rows[tokens], ids, weights[tokens])
        return y.reshape(hidden_states.shape)

    def _check(self, *inputs: Tensor) -> None:
        _check_usable(*inputs)

    def summed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[M, H] in bf16 of rows [M, H], ids and weights [M, K], of packed experts alone; with the
        norm of each expert's output where there is one. Ids of -1 are skipped."""
        if self.post_expert_norm is None:
            return self._run(rows, ids, weights)
        pieces = (torch.split(part, _NORMED_AT_ONCE) for part in (rows, ids, weights))
        return torch.cat([self._normed(*piece) for piece in zip(*pieces, strict=True)])

    def _normed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Each expert of a token runs as if it were a token's only one, with weight 1."""
        assert self.post_expert_norm is not None
        alone = rows.repeat_interleave(ids.shape[1], dim=0)
        slots = ids.reshape(-1, 1)
        y = self.post_expert_norm(self._run(alone, slots, torch.ones(slots.shape)).to(rows.dtype))
        weights = torch.where(ids < 0, 0, weights)[..., None]
        summed: Tensor = (y.reshape(*ids.shape, -1) * weights).sum(dim=1)
        return summed

    def _run(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """bf16 [M, H]; NumPy has no bf16, so both sides see its bits."""
        x = rows.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        y = self.experts.forward(
            x.view(np.uint16),
            ids.contiguous().numpy(),
            weights.detach().to(torch.float32).contiguous().numpy(),
            self.pool or Pool.shared(),
        )
        return torch.from_numpy(y.view(np.int16)).view(torch.bfloat16)

    def _output_of(self, own: StoredExperts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[M, H]: what the model's own experts add. An id of -1 is none: the model's module, which
        does not accept that, gets one of the others with weight 0 instead."""
        there, some = ids >= 0, int(ids.max())
        y: Tensor = own.module(rows, torch.where(there, ids, some), torch.where(there, weights, 0))
        return y.reshape(rows.shape)

    def compared(self, own: StoredExperts, expert: int, token: Tensor) -> tuple[Tensor, Tensor]:
        """An expert's output for one token [1, H]: the model's own, and the packed one's."""
        # Twice, as LongCat's module does not work with one expert per token.
        ids, weights = torch.full((1, 2), expert), torch.tensor([[1, 0]], dtype=token.dtype)
        theirs = self._output_of(own, token, ids, weights)
        return theirs, self.summed(token, ids, weights).to(token.dtype)

    @staticmethod
    def routing(module: Any, arguments: Sequence[Any]) -> Routing:
        """What a call chooses, of a module that is packed or the model's own."""
        return Routing(*arguments)

    def extra_repr(self) -> str:
        e = self.experts
        return f"{e.count} experts of {e.format.key}, hidden {e.hidden}, inner {e.intermediate}"


class SortedExperts(PackedExperts):
    """For Llama 4, whose block gives each expert all tokens, already times their weights.

    Tokens that an expert is not chosen for are zeros and are skipped: without biases an expert's
    output for zeros is zero.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor
    ) -> Tensor:
        """[E * M, H] -> [E * M, H]; the rows of expert e are those from e * M on."""
        rows = hidden_states.reshape(-1, self.experts.hidden)
        owners = torch.arange(self.experts.count).repeat_interleave(len(rows) // self.experts.count)
        ids = torch.where(rows.detach().any(dim=1), owners, -1)
        return super().forward(rows, ids, torch.ones(len(rows)))

    def _output_of(self, own: StoredExperts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Each row has one id."""
        place = ids[:, 0], torch.arange(len(rows))
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
    """For modules that cannot be called with ids: their experts run matrix by matrix."""

    def _output_of(self, own: StoredExperts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        linear, y = nn.functional.linear, torch.zeros_like(rows)
        function = getattr(own.module, "activation", nn.functional.silu)
        for expert in torch.unique(ids[ids >= 0]).tolist():
            token, slot = torch.where(ids == expert)
            gate, up, down = own.matrices(expert).values()
            inner = function(linear(rows[token], gate)) * linear(rows[token], up)
            y.index_add_(0, token, linear(inner, down) * weights[token, slot, None].to(y.dtype))
        return y


class LogitsExperts(_ByMatrices):
    """For Aria, whose experts choose by the router's logits themselves."""

    def __init__(
        self, experts: Experts, pool: Pool | None = None, own: StoredExperts | None = None
    ) -> None:
        super().__init__(experts, pool, own)
        assert own is not None
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
    """For JetMoE, whose experts are part of the module that has their router and a bias."""

    def __init__(
        self, experts: Experts, pool: Pool | None = None, own: StoredExperts | None = None
    ) -> None:
        super().__init__(experts, pool, own)
        assert own is not None
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
        experts = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        shape = (len(rows), -1)
        return Routing(hidden, experts[order].reshape(shape), weights[order].reshape(shape))


_CLASSES: Mapping[Call, type[PackedExperts]] = {
    "routed": PackedExperts,
    "sorted": SortedExperts,
    "logits": LogitsExperts,
    "block": ExpertsBlock,
}


def packed_class(own: StoredExperts) -> type[PackedExperts]:
    """The class whose objects are called as `own` is; CheckpointError where that is not known."""
    if own.call is None:
        raise CheckpointError(
            f"{type(own.module).__name__} is called in a way that is not known",
        )
    return _CLASSES[own.call]


def _check_usable(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UsageError(
                f"packed experts run on the CPU, but their input is on {tensor.device}",
                "keep the model on the CPU",
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise UsageError(
                "packed experts have no gradients, but their input needs one",
                "call the model under torch.no_grad() or torch.inference_mode()",
            )
