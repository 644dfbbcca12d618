"""Steps of some families on the weights of chosen experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ktconv.errors import UsageError
from ktconv.formats.decode import f32_to_bf16, round_to_bf16
from ktconv.runtime.arrays import kind_of
from ktconv.runtime.route.scores import floats, integers, rows_of
from ktconv.system.arrays import F32
from ktconv.system.numbers import whole
from ktconv.system.units import counted


def weight_on_input(x: Any, weights: Any) -> tuple[Any, Any]:
    """x times its weight, in x's dtype, and weights of 1, for layers that multiply the experts'
    inputs: Llama-4.

    x [M, H]; weights [M, 1] are rounded to x's dtype first, as the products are. Raises UsageError
    for several experts per token: their inputs would differ.
    """
    tokens, hidden = rows_of("x", x, "tokens, hidden size")
    k = rows_of("weights", weights, "tokens, 1")[1]
    if k != 1:
        raise UsageError(
            f"weights of {counted(k, 'expert')} per token cannot be applied to one input",
            "give each expert of a token a row of x of its own",
        )
    values, factors = floats("x", x, (tokens, hidden)), floats("weights", weights, (tokens, 1))
    dtype = kind_of("x", x).names[x.dtype]
    products = values * _ROUNDED[dtype](factors)  # exact for the narrow dtypes
    ones = kind_of("weights", weights).of_numpy(np.ones_like(factors))
    return _narrowed(products, x, dtype), ones


_ROUNDED: Mapping[str, Callable[[F32], F32]] = {
    "bf16": round_to_bf16,
    "fp16": lambda values: values.astype(np.float16).astype(np.float32),
    "fp32": lambda values: values,
}


def _narrowed(values: F32, like: Any, dtype: str) -> Any:
    """`values` in the dtype and kind of `like`."""
    if isinstance(like, np.ndarray) and dtype == "bf16":
        return f32_to_bf16(values)
    kind = kind_of("x", like)
    return kind.copy(kind.of_numpy(values), dtype)


def identity_experts(ids: Any, weights: Any, experts: int) -> tuple[Any, Any]:
    """Ids with -1 in place of experts that return their input (`experts` and above), and the sum of
    the weights of these, float32 [M], by which x is multiplied and added to the layer's output.

    ids of integers and weights [M, K]. Experts are not asked for calls whose result is known, and
    none of them gets a call too many.
    """
    shape = rows_of("ids", ids, "tokens, experts per token")
    numbers, factors = integers("ids", ids, shape), floats("weights", weights, shape)
    same = numbers >= whole("experts", experts)
    added: F32 = np.where(same, factors, np.float32(0)).sum(axis=1, dtype=np.float32)
    return (
        kind_of("ids", ids).of_numpy(np.where(same, -1, numbers)),
        kind_of("weights", weights).of_numpy(added),
    )
