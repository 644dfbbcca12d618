"""Routers of one token: which experts, and with what weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from ktconv import native
from ktconv.generate.outside.linears import is_bf16, linear_of, replaced_forward
from ktconv.generate.outside.trial import answer_of
from ktconv.system.pool import Pool

_CLOSE = 2**-7  # of weights in bf16


class KnownRouter(Struct, frozen=True):
    """A router in the terms of the C library; `rounded`: its weights are in bf16."""

    gate: native.Linear
    router: native.Router
    experts: int
    rounded: bool


@contextmanager
def routers_on(model: Any, pool: Pool) -> Iterator[dict[nn.Module, KnownRouter]]:
    """Modules that answer with logits, weights and experts of tokens, as the kernels do, have one
    token computed there inside: what they are."""
    found = {one: known for one in model.modules() if (known := _known(one)) is not None}
    with ExitStack() as stack:
        for module, known in found.items():
            forward = _forward_of(module, known, pool)
            stack.enter_context(replaced_forward(module, forward))
        yield found


def _known(module: nn.Module) -> KnownRouter | None:
    weight, parameters = getattr(module, "weight", None), list(module.parameters())
    if "Router" not in type(module).__name__ or len(parameters) != 1 or weight is None:
        return None
    if weight.dim() != 2 or not is_bf16(weight) or next(module.buffers(), None) is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((8, weight.shape[1]), generator=generator).bfloat16()
    return _of_answer(weight, x, answer_of(module, x))


def _of_answer(weight: Tensor, x: Tensor, answer: Any) -> KnownRouter | None:
    """The router that answers (logits, weights, ids) for x."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        return None
    logits, weights, ids = answer
    tokens, experts = len(x), len(weight)
    if logits.shape != (tokens, experts) or logits.dtype is not torch.bfloat16:
        return None
    if weights.shape != ids.shape or ids.dim() != 2 or ids.dtype is not torch.int64:
        return None
    for renormalise, by_logits in ((True, False), (False, False), (False, True)):
        router = native.Router(
            "softmax", ids.shape[1], renormalise=renormalise, by_logits=by_logits
        )
        own_ids, own = map(torch.from_numpy, native.choose_experts(router, logits.float().numpy()))
        apart = own.sub(weights.float()).abs()
        # Not the ids: which of equal logits comes first is not defined.
        same = torch.equal(logits.gather(1, own_ids), logits.gather(1, ids))
        if same and bool((apart <= _CLOSE * weights.float()).all()):
            rounded = weights.dtype is torch.bfloat16
            return KnownRouter(linear_of(weight, None), router, experts, rounded)
    return None


def _forward_of(module: Any, known: KnownRouter, pool: Pool) -> Callable[..., Any]:
    own, cols = module.forward, module.weight.shape[1]
    dtype = torch.bfloat16 if known.rounded else torch.float32

    def forward(*given: Any, **named: Any) -> Any:
        if len(given) != 1 or named:
            return own(*given, **named)
        x = given[0]
        if x.numel() != cols or not is_bf16(x) or torch.is_grad_enabled():
            return own(x)
        logits = x.new_empty((1, known.experts))
        known.gate.run(pool, 1, x.data_ptr(), logits.data_ptr())
        ids, weights = native.choose_experts(known.router, logits.float().numpy())
        return logits, torch.from_numpy(weights).to(dtype), torch.from_numpy(ids)

    return forward
