"""The experts module that runs on the C kernels, called with ids and weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktconv.errors import UsageError
from ktconv.model.own import OwnExperts
from ktconv.runtime import MoELayer
from ktconv.runtime.adapters import LayerAdapters
from ktconv.runtime.compiled import uncompiled
from ktconv.runtime.layers import Experts
from ktconv.runtime.staging import on_cpu, on_device
from ktconv.system.pool import Pool
from ktconv.system.units import counted

_NORMED_AT_ONCE = 1024  # tokens; each of their experts' outputs is in memory for the norm


class Routing(NamedTuple):
    """Choice of experts in a call: ids [M, K], -1 for none. `hidden` [..., H] and `weights` [M, K]
    are None where the module gets only their products."""

    hidden: Tensor | None
    ids: Tensor
    weights: Tensor | None


class PackedExperts(nn.Module):
    """Takes the place of a module with all experts of a layer; has no parameters of experts.

    Without a pool it uses the process's own, so that it works in a child process too. `own` is
    what was there before: experts that are not among the packed ones run on it, or are skipped
    without it, and a norm of the experts' outputs stays in the model's tree.

    The kernels run on the CPU; inputs may be on any device, and outputs are on the device of their
    inputs.

    `lora`, called with hidden states, ids and weights, computes in the place of `experts`; it has
    gradients.
    """

    def __init__(
        self,
        experts: Experts,
        pool: Pool | None = None,
        own: OwnExperts | None = None,
        lora: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.pool, self.lora = experts, pool, lora
        self.adapters: LayerAdapters | None = None  # of ktconv.model.add_adapters,
        self.adapter: str | Sequence[str | None] | None = None  # and which: of each sequence
        self._elsewhere = torch.from_numpy(experts.origins < 0)
        self._identities = own.identities if own else 0
        self.names = own.names if own else {}
        self.parameters_of_all = own.parameters_of_all if own else ()
        self.post_expert_norm = own.norm if own else None
        # Those that still run; in a tuple, as no part of the model's tree.
        self.own = (own,) if own is not None and bool(self._elsewhere.any()) else ()
        if own is not None:
            self._adopt(own)

    def _adopt(self, own: OwnExperts) -> None:
        """Take arguments by the names that the model's own module has for them. Modules that are
        called in another way take more than that from it."""
        if own.call != "routed":
            return
        names = list(inspect.signature(own.module.forward).parameters)

        def by_position(_: nn.Module, given: Any, named: Mapping[str, Any]) -> Any:
            return (*given, *(named[name] for name in names[len(given) :])), {}

        if names != list(inspect.signature(self.forward).parameters):
            self.register_forward_pre_hook(by_position, with_kwargs=True)

    @uncompiled
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Like transformers' experts: [..., H] -> [..., H], in the dtype and shape of the input.

        top_k_index and top_k_weights are [M, K], or any shape with M * K elements, M the number
        of tokens. Experts below 0 or from the number of experts on are skipped, except those of
        the model whose outputs are their inputs. Raises UsageError where an input needs a gradient
        or has no values (meta).
        """
        given = self._fetched(hidden_states, top_k_index, top_k_weights)
        return on_device(self._answer(*given), hidden_states)

    def _answer(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`forward` of tensors on the CPU."""
        rows = hidden.reshape(-1, self.experts.hidden)
        if not rows.numel() or not top_k_index.numel():
            return torch.zeros_like(hidden)
        ids = top_k_index.reshape(len(rows), -1).to(torch.int64)
        weights = top_k_weights.reshape(len(rows), -1)
        if not self._identities and not self.own:
            return self.summed(rows, ids, weights).to(hidden.dtype).reshape(hidden.shape)
        number = self.experts.count
        real = (ids >= 0) & (ids < number)
        chosen = torch.where(real, ids, -1)
        y = self.summed(rows, chosen, weights).to(hidden.dtype)
        for expert in range(number, number + self._identities):  # as the model's own module does
            token, slot = torch.where(ids == expert)
            weighted = rows[token] * weights[token, slot, None]
            y.index_add_(0, token, weighted.to(y.dtype))
        for own in self.own:
            there = real & self._elsewhere[chosen]
            tokens = there.any(dim=1)
            if tokens.any():
                ids = torch.where(there, ids, -1)[tokens]
                y[tokens] += self._asked(own, rows[tokens], ids, weights[tokens])
        return y.reshape(hidden.shape)

    def _fetched(self, *inputs: Tensor) -> list[Tensor]:
        """Inputs that can be used: on the CPU, or where they are if LoRA fetches them."""
        _check_values(*inputs)
        if self.lora is not None:
            return list(inputs)
        _check_without_gradients(*inputs)
        return on_cpu(*inputs)

    def summed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[M, H] in bf16 of rows [M, H], ids and weights [M, K], of packed experts alone; with the
        norm of each expert's output where there is one."""
        if self.post_expert_norm is None:
            return self._run(rows, ids, weights)
        pieces = (torch.split(part, _NORMED_AT_ONCE) for part in (rows, ids, weights))
        return torch.cat([self._normed(*piece) for piece in zip(*pieces, strict=True)])

    def _normed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Each expert of a token runs as if it were a token's only one, with weight 1."""
        assert self.post_expert_norm is not None
        alone = rows.repeat_interleave(ids.shape[1], dim=0)
        slots = ids.reshape(-1, 1)
        outputs = self._run(alone, slots, rows.new_ones(slots.shape)).to(rows.dtype)
        place = next(self.post_expert_norm.parameters(), outputs).device  # of what is no expert
        y = self.post_expert_norm(outputs.to(place)).to(outputs.device)
        weights = torch.where(ids < 0, 0, weights)[..., None]
        summed: Tensor = (y.reshape(*ids.shape, -1) * weights).sum(dim=1)
        return summed

    def _run(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[M, H] in bf16, of LoRA in the dtype of rows."""
        x = rows if rows.dtype != torch.float64 else rows.float()
        if self.lora is not None:
            found: Tensor = self.lora(x, ids, weights)
            return found
        y = rows.new_empty(rows.shape, dtype=torch.bfloat16)
        layer = MoELayer(self.experts, self.pool, self.adapters)
        chosen = self._chosen(len(rows))
        layer(x.detach(), ids, weights.detach().float(), skip=self._elsewhere, out=y, **chosen)
        return y

    @property
    def is_plain(self) -> bool:
        """Whether a call is one of the C library: experts of the output alone, without LoRA, and
        nothing around them."""
        around = self._identities or self.own or self.is_adapted
        experts = self.experts
        return not around and not experts.weight_on_input and experts.norm is None

    @property
    def is_adapted(self) -> bool:
        """Whether LoRA computes in the place of the experts, or adds to them."""
        return self.lora is not None or self.adapters is not None

    @property
    def skip_address(self) -> int:
        """Address of bool [E], which marks experts that are not among the packed ones."""
        return int(self._elsewhere.data_ptr())

    def _chosen(self, tokens: int) -> dict[str, Any]:
        """Arguments of a layer that choose its adapters. UsageError where tokens are not those of
        the sequences that have them."""
        if self.adapters is None or self.adapter is None or isinstance(self.adapter, str):
            return {"adapter": self.adapter}
        if self.post_expert_norm is not None:
            raise UsageError(
                "this model normalises the outputs of its experts, for which sequences cannot have "
                "adapters of their own",
                "run them one by one",
            )
        expect_sequences(tokens, len(self.adapter))
        names = self.adapters.names
        numbers = [-1 if one is None else names.index(one) for one in self.adapter]
        each = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        return {"adapter_ids": each.repeat_interleave(tokens // len(numbers))}

    def _asked(self, own: OwnExperts, *inputs: Tensor) -> Tensor:
        """`_output_of` where the model's own experts are, from and to the CPU."""
        (y,) = on_cpu(self._output_of(own, *(one.to(own.device) for one in inputs)))
        return y

    def _output_of(self, own: OwnExperts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[M, H]: what the model's own experts add. An id of -1 is none: the model's module, which
        does not accept that, gets one of the others with weight 0 instead."""
        there, some = ids >= 0, int(ids.max())
        y: Tensor = own.module(rows, torch.where(there, ids, some), torch.where(there, weights, 0))
        return y.reshape(rows.shape)

    def compared(self, own: OwnExperts, expert: int, token: Tensor) -> tuple[Tensor, Tensor]:
        """An expert's output for one token [1, H]: the model's own, and the packed one's."""
        # Twice, as LongCat's module does not work with one expert per token.
        ids, weights = torch.full((1, 2), expert, device="cpu"), token.new_tensor([[1, 0]])
        theirs = self._asked(own, token, ids, weights)
        return theirs, self.summed(token, ids, weights).to(token.dtype)

    @staticmethod
    def routing(module: Any, arguments: Sequence[Any]) -> Routing:
        """Routing of a call, to a module that is packed or the model's own."""
        return Routing(*arguments)

    @property
    def nbytes(self) -> int:
        """Size of the packed weights."""
        return self.experts.expert_bytes * int((~self._elsewhere).sum())

    def extra_repr(self) -> str:
        e = self.experts
        count = counted(e.count, "expert")
        return f"{count} of {e.format.key}, hidden {e.hidden}, inner {e.intermediate}"


def expect_sequences(tokens: int, sequences: int) -> None:
    """Refuse tokens that cannot be those of `sequences` sequences of one length (UsageError)."""
    if not sequences or tokens % sequences:
        raise UsageError(
            f"{counted(tokens, 'token', 'are')} not those of "
            f"{counted(sequences, 'sequence')} of one length",
            "give using() a name for each sequence of the batch",
        )


def _check_values(*tensors: Tensor) -> None:
    if any(tensor.is_meta for tensor in tensors):
        raise UsageError(
            "packed experts got an input on meta, which has no values",
            "load the other parts of the model, or move them to a device that computes",
        )


def _check_without_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UsageError(
            "packed experts have no gradients, but their input needs one",
            "call the model under torch.no_grad() or torch.inference_mode(), or put experts that "
            "have gradients into it with ktconv.train.prepare",
        )
