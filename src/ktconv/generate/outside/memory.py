"""Weights on huge pages: a token reads them all once, and a tenth more of them a second there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktconv.errors import ResourceError
from ktconv.system.blocks import new_block

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
