"""Arrays of routers, of NumPy or torch, as those of NumPy."""

from __future__ import annotations

from typing import Any

from ktconv.errors import UsageError
from ktconv.runtime.arrays import INTEGERS, kind_of, operand
from ktconv.system.arrays import F32, I64


def floats(name: str, array: Any, shape: tuple[int, ...]) -> F32:
    """Floats in place if they are float32 and contiguous; bf16 and fp16 are widened."""
    owner = operand(name, array, shape, ("fp32",), ("bf16", "fp16")).owner
    values: F32 = kind_of(name, owner).numpy(owner)
    return values


def integers(name: str, array: Any, shape: tuple[int, ...]) -> I64:
    owner = operand(name, array, shape, INTEGERS[-1:], INTEGERS[:-1]).owner
    values: I64 = kind_of(name, owner).numpy(owner)
    return values


def rows_of(name: str, array: Any, what: str) -> tuple[int, int]:
    """The shape of a matrix; UsageError for anything else."""
    kind_of(name, array)
    if array.ndim != 2:
        raise UsageError(f"{name} must be [{what}], got {list(array.shape)}")
    rows, cols = array.shape
    return int(rows), int(cols)
