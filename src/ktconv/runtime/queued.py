"""Calls of layers as tasks that CUDA streams start."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ktconv import native
from ktconv.runtime import workspace
from ktconv.runtime.arguments import Arguments
from ktconv.runtime.arrays import Operand, operand
from ktconv.runtime.compute import compute, described, is_plain, values_at, workspace_size
from ktconv.runtime.layers import Experts
from ktconv.system.pool import Pool

Split = tuple[Operand, Operand, int]  # ids of now and of later, and how many are now


def task_of(
    packed: Experts, pool: Pool, name: str, call: Arguments, mask: Any, split: Any
) -> native.Task:
    """`call` as a task; see `MoELayer.task`. It needs no interpreter, but for layers whose experts
    have something around them."""
    live = None if mask is None else operand("mask", mask, (packed.count,), ("bool",))
    cut: Split | None = None
    if split is not None:
        shape = tuple(call.ids.owner.shape)
        now, later = (operand("split", one, shape, ("int64",)) for one in split[:2])
        cut = now, later, int(split[2])
    if is_plain(packed, call):
        task = _native_task(packed, pool, name, call, live, cut)
    else:
        task = _python_task(packed, pool, name, call, live, cut)
    task.owners = packed, call, mask, split
    return task


def _native_task(
    packed: Experts, pool: Pool, name: str, call: Arguments, live: Operand | None, cut: Split | None
) -> native.Task:
    size = workspace_size(packed.layer, pool, call.tokens, call.top_k, call.adapters)
    scratch = pool.tasks.scratch(size, partial(workspace.made, pool))
    return native.CallTask(
        pool.tasks, name, packed.layer, pool, described(call), scratch, call.adapters,
        mask=live.address if live else 0,
        skip=call.skip.address if call.skip else 0,
        now=cut[0].address if cut else 0,
        later=cut[1].address if cut else 0,
        keep=cut[2] if cut else 0,
    )  # fmt: skip


def _python_task(
    packed: Experts, pool: Pool, name: str, call: Arguments, live: Operand | None, cut: Split | None
) -> native.Task:
    ids = call.tokens, call.top_k

    def work() -> None:
        made = call
        if live and call.skip:
            values_at(call.skip, (packed.count,))[:] = values_at(live, (packed.count,))
        if cut:
            now, later = (values_at(one, ids) for one in cut[:2])
            split_ids(values_at(call.ids, ids), values_at(call.weights, ids), cut[2], now, later)
            made = call._replace(ids=cut[0])
        compute(packed, pool, made)

    def fail() -> None:
        y = values_at(call.y, (call.tokens, packed.hidden))
        y.view(np.uint8)[:] = 0xFF  # NaN in every dtype

    return native.PythonTask(pool.tasks, name, work, fail)


def split_ids(ids: Any, weights: Any, keep: int, now: Any, later: Any) -> None:
    """Arrays [T, K]: `now` gets the ids of each token's `keep` experts of largest weight, `later`
    those of the others; -1 where an expert is in the other one. Of equal weights the first is kept;
    ids below 0 count as the smallest."""
    order = np.where(ids < 0, -np.inf, weights)
    first = np.argsort(-order, axis=-1, kind="stable")[..., :keep]
    kept = np.zeros(ids.shape, bool)
    np.put_along_axis(kept, first, True, axis=-1)
    now[...], later[...] = np.where(kept, ids, -1), np.where(kept, -1, ids)
