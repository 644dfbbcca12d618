"""Experts modules of transformers models that run on the C kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ktconv.errors import UsageError
from ktconv.moe import Experts
from ktconv.system.pool import Pool


class PackedExperts(nn.Module):
    """Takes the place of a model's fused experts; it has no parameters of its own.

    Without a pool it uses the process's own, so that it works in a child process too. `own` is
    the module that was there before: experts that are not among the packed ones run on it, or
    are skipped without it.
    """

    def __init__(
        self, experts: Experts, pool: Pool | None = None, own: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.experts, self.pool = experts, pool
        self._elsewhere = torch.from_numpy(experts.origins < 0)
        self._own = (own,) if own is not None and bool(self._elsewhere.any()) else ()
        # in a tuple, so that the model's own experts are no part of the model's tree

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Like transformers' experts: [..., H] -> [..., H], in the dtype and shape of the input.

        top_k_index and top_k_weights are [M, K], or any shape with M * K elements, M the number
        of tokens. Experts below 0 or from the number of experts on are skipped. Raises UsageError
        where an input needs a gradient or is not on the CPU.
        """
        _check_usable(hidden_states, top_k_weights)
        rows = hidden_states.reshape(-1, self.experts.hidden)
        if not rows.numel() or not top_k_index.numel():
            return torch.zeros_like(hidden_states)
        ids = top_k_index.reshape(len(rows), -1).to(torch.int64)
        ids = torch.where((ids < 0) | (ids >= self.experts.count), -1, ids)
        weights = top_k_weights.reshape(len(rows), -1)
        there = (ids >= 0) & self._elsewhere[ids]
        y = self._run(rows, torch.where(there, -1, ids), weights).to(hidden_states.dtype)
        for own in self._own:
            y = self._add_own(own, y, rows, torch.where(there, ids, -1), weights)
        return y.reshape(hidden_states.shape)

    def _add_own(
        self, own: nn.Module, y: Tensor, rows: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """y plus the outputs of the model's own experts. Ids of packed experts are -1 here, which
        the model's module does not accept: it gets one of its own ids with weight 0 instead."""
        tokens = (ids >= 0).any(dim=1)
        if not tokens.any():
            return y
        ids, weights = ids[tokens], weights[tokens]
        some = int(self._elsewhere.nonzero()[0])
        theirs = own(
            rows[tokens], torch.where(ids < 0, some, ids), torch.where(ids < 0, 0, weights)
        )
        y[tokens] += theirs
        return y

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

    def _add_own(
        self, own: nn.Module, y: Tensor, rows: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        result: Tensor = y + own(torch.where(ids >= 0, rows, 0)).reshape(y.shape)
        return result


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
