"""Calls of layers on the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import VALUE_DTYPES
from ktconv.runtime import workspace
from ktconv.runtime.arguments import Arguments
from ktconv.runtime.arrays import Operand, of_numpy
from ktconv.runtime.layers import Experts
from ktconv.system.arrays import F32, U16, Array
from ktconv.system.pool import Pool

_ID_SIZES = {"int32": 4, "int64": 8}
_DTYPES = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32, "int32": np.int32,
           "int64": np.int64, "bool": np.bool_}  # fmt: skip

_ROWS = 2048  # the kernels' batch
# Bytes of temporary arrays for each element of x, and of a row of one token and one expert.
_WEIGHTED_BYTES, _NORMED_BYTES, _NORMED_ROW_BYTES = 8, 14, 20


def compute(packed: Experts, pool: Pool, call: Arguments) -> None:
    """Writes y of `call`."""
    worded(partial(_compute, packed, pool, call))


def prepared(packed: Experts, pool: Pool, call: Arguments) -> Callable[[], Any]:
    """A function that computes `call` from what its memory has then, and returns its y."""
    work = partial(_compute, packed, pool, call)
    if is_plain(packed, call):
        work = partial(_run, packed.layer, pool, call, described(call))
    y = call.y.owner

    def run() -> Any:
        worded(work)
        return y

    return run


def is_plain(packed: Experts, call: Arguments) -> bool:
    """Whether the C library computes all of `call`."""
    around = packed.weight_on_input or packed.norm is not None
    return bool(call.tokens and call.top_k and not around)


def worded(work: Callable[[], None]) -> None:
    """UsageError for what the C library refuses."""
    try:
        work()
    except native.NoWeightsError as error:
        hint = "mark such experts in `skip`, or give -1 as their id"
        raise UsageError(str(error), hint) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def working_bytes(
    packed: Experts,
    pool: Pool,
    tokens: int,
    top_k: int,
    adapters: native.ChosenAdapters | None = None,
) -> int:
    """Memory that `compute` takes; UsageError for numbers that cannot be computed."""
    size = workspace_size(packed.layer, pool, tokens, top_k, adapters)
    if packed.weight_on_input:
        size += tokens * packed.hidden * _WEIGHTED_BYTES
    if packed.norm is not None:
        rows = min(tokens, _tokens_at_once(top_k)) * top_k
        size = workspace_size(packed.layer, pool, rows, 1, adapters)
        size += packed.hidden * (rows * _NORMED_ROW_BYTES + tokens * _NORMED_BYTES)
    return size


def workspace_size(
    layer: native.Layer,
    pool: Pool,
    tokens: int,
    top_k: int,
    adapters: native.ChosenAdapters | None = None,
) -> int:
    """Bytes; UsageError for numbers that cannot be computed."""
    try:
        return layer.scratch_size(tokens, top_k, pool, adapters)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(str(error)) from None


def _compute(packed: Experts, pool: Pool, call: Arguments) -> None:
    if not call.tokens:
        return
    if not call.top_k:
        _store(call, np.zeros((call.tokens, packed.hidden), np.float32))
        return
    if packed.weight_on_input:
        call = _weighted_inputs(packed, call)
    if packed.norm is not None:
        _store(call, _normed(packed, pool, call))
    else:
        _forward(packed.layer, pool, call)


def _forward(layer: native.Layer, pool: Pool, call: Arguments) -> None:
    _run(layer, pool, call, described(call))


def described(call: Arguments) -> native.Call:
    """`call` for the C library, which keeps nothing alive."""
    return native.Call(
        call.tokens,
        call.top_k,
        call.x.address,
        call.ids.address,
        call.weights.address,
        call.skip.address if call.skip else 0,
        call.add.address if call.add else 0,
        call.y.address,
        id_size=_ID_SIZES[call.ids.dtype],
        x_dtype=VALUE_DTYPES[call.x.dtype],
        y_dtype=VALUE_DTYPES[call.y.dtype],
    )


def _run(layer: native.Layer, pool: Pool, call: Arguments, made: native.Call) -> None:
    """`made` describes `call`."""
    memory = workspace.take(pool)
    try:
        layer.run(pool, made, memory, call.adapters)
    except native.ScratchError:  # its size is not asked for each time
        size = workspace_size(layer, pool, call.tokens, call.top_k, call.adapters)
        memory = workspace.take(pool, size)
        layer.run(pool, made, memory, call.adapters)
    finally:
        workspace.give(pool, memory)


# ---- experts with something around them: seldom, so in NumPy ----------------


def _weighted_inputs(packed: Experts, call: Arguments) -> Arguments:
    """The router's weight on the input instead of the output (Llama 4): with one expert per token
    only, as otherwise each has another input."""
    if call.top_k != 1:
        raise UsageError(
            f"this model's router weights multiply inputs, which needs one expert per token, not "
            f"{call.top_k}"
        )
    x = _values(call.x, (call.tokens, packed.hidden))
    weights = values_at(call.weights, (call.tokens, 1))
    return call._replace(x=of_numpy(x * weights), weights=of_numpy(np.ones_like(weights)))


def _normed(packed: Experts, pool: Pool, call: Arguments) -> F32:
    shape = call.tokens, call.top_k
    ids, weights = values_at(call.ids, shape), values_at(call.weights, shape)
    here = (ids >= 0) & (ids < packed.count)
    if call.skip:
        here &= ~values_at(call.skip, (packed.count,))[np.where(here, ids, 0)]
    x = f32_to_bf16(_values(call.x, (call.tokens, packed.hidden)))
    ids, count = np.where(here, ids, -1), _tokens_at_once(call.top_k)
    blocks = [slice(first, first + count) for first in range(0, call.tokens, count)]
    found = []
    for b in blocks:
        alone = _slots_alone(packed, pool, call, x[b], ids[b], b)
        found.append(packed.normed(alone, ids[b], weights[b]))
    return np.concatenate(found)


def _slots_alone(
    packed: Experts, pool: Pool, call: Arguments, x: U16, ids: Array, tokens: slice
) -> U16:
    """The outputs of each expert of these tokens of `call`, [tokens * top_k, H], before anything is
    added up."""
    top_k = call.top_k
    rows = np.repeat(x, top_k, axis=0)
    y, adapters = np.empty_like(rows), call.adapters
    if adapters is not None:
        numbers = np.zeros(0, np.int32)
        if call.adapter_ids is not None:
            of_token = native.array_at(adapters.of_token, np.int32, (call.tokens,))
            numbers = np.repeat(of_token[tokens], top_k)
        adapters = adapters.of_rows(native.address_of(numbers))
    made = Arguments(
        len(rows),
        1,
        of_numpy(rows),
        of_numpy(np.ascontiguousarray(ids.reshape(-1, 1))),
        of_numpy(np.ones((len(rows), 1), np.float32)),
        None,
        None,
        of_numpy(y),
        adapters,
        None if adapters is None else numbers,
    )
    _forward(packed.layer, pool, made)
    return y


def _tokens_at_once(top_k: int) -> int:
    """Tokens at once for experts whose outputs are normalised: each is a row, and rows take
    memory."""
    return max(1, _ROWS // max(1, top_k))


def _store(call: Arguments, y: F32) -> None:
    """y, with what is to be added, rounded once."""
    if call.add:
        y = y + values_at(call.add, y.shape)
    into = values_at(call.y, y.shape)
    with np.errstate(over="ignore"):
        into[:] = f32_to_bf16(y) if call.y.dtype == "bf16" else y.astype(into.dtype)


def _values(found: Operand, shape: tuple[int, ...]) -> F32:
    array = values_at(found, shape)
    return bf16_to_f32(array) if found.dtype == "bf16" else array.astype(np.float32)


def values_at(found: Operand, shape: tuple[int, ...]) -> Array:
    """The memory of an operand, whatever it belongs to."""
    return native.array_at(found.address, _DTYPES[found.dtype], shape)
