"""Linear layers of few tokens, with weights on huge pages: a token reads them all once, and a tenth
more of them a second there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ktconv import native
from ktconv.errors import ResourceError
from ktconv.system.blocks import new_block
from ktconv.system.pool import Pool

FEW = 2  # tokens; PyTorch's products of more are as fast


@contextmanager
def linears_on(model: Any, pool: Pool) -> Iterator[dict[nn.Module, native.Linear]]:
    """Linear layers in bf16 compute few tokens on `pool` inside: the kernel of each.

    Their weights move to huge pages, where there are some, and stay there.
    """
    known = [one for one in model.modules() if type(one) is nn.Linear and _is_known(one)]
    on_huge_pages([one.weight for one in known])
    kernels: dict[nn.Module, native.Linear] = {
        one: linear_of(one.weight, one.bias) for one in known
    }
    with ExitStack() as stack:
        for module in known:
            forward = _forward_of(module, kernels[module], pool)
            stack.enter_context(replaced_forward(module, forward))
        yield kernels


def linear_of(weight: Tensor, bias: Tensor | None) -> native.Linear:
    """The kernel of weight [rows, cols] and bias [rows], which must stay where they are."""
    rows, cols = weight.shape
    return native.Linear(rows, cols, weight.data_ptr(), 0 if bias is None else bias.data_ptr())


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Another `forward` for one module, for a while."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _is_known(module: nn.Linear) -> bool:
    arrays = [one for one in (module.weight, module.bias) if one is not None]
    return all(is_bf16(one) for one in arrays) and module.weight.numel() > 0


def is_bf16(tensor: Tensor) -> bool:
    """Whether the kernels can read a tensor where it lies."""
    there = tensor.device.type == "cpu" and tensor.dtype is torch.bfloat16
    return there and tensor.is_contiguous()


def _forward_of(module: nn.Linear, one: native.Linear, pool: Pool) -> Callable[[Tensor], Tensor]:
    weight, bias = module.weight, module.bias
    rows, cols = weight.shape
    few = FEW * cols

    def forward(input: Tensor) -> Tensor:
        count = input.numel()
        if not 0 < count <= few or not is_bf16(input) or torch.is_grad_enabled():
            return linear(input, weight, bias)
        shape = input.shape
        if shape[-1] != cols:
            return linear(input, weight, bias)
        y = input.new_empty((*shape[:-1], rows))
        one.run(pool, count // cols, input.data_ptr(), y.data_ptr())
        return y

    return forward


_BLOCK = 32 << 20  # bytes that are there twice at a time
_ALIGNED = 64


def on_huge_pages(weights: Sequence[Tensor]) -> None:
    """Move the memory of contiguous tensors; those that share theirs go on sharing it. They stay
    where they are where there is no memory."""
    storages: dict[int, list[Tensor]] = {}
    for one in weights:
        storages.setdefault(one.untyped_storage().data_ptr(), []).append(one)
    run: list[Tensor] = []
    for sharing in storages.values():
        if len({(one.data_ptr(), one.shape) for one in sharing}) > 1:
            continue  # parts of a larger one
        run.append(sharing[0])
        if sum(map(_room, run)) >= _BLOCK:
            _move(run)
            run = []
    _move(run)


def _room(weight: Tensor) -> int:
    return -(-weight.nbytes // _ALIGNED) * _ALIGNED


def _move(run: Sequence[Tensor]) -> None:
    try:
        block = torch.from_numpy(new_block(sum(map(_room, run)))) if run else None
    except ResourceError:
        return
    at = 0
    for weight in run:
        assert block is not None
        bits = block[at : at + weight.nbytes].view(weight.dtype)
        bits.copy_(weight.detach().reshape(-1))
        weight.data = bits.reshape(weight.shape)
        at += _room(weight)
