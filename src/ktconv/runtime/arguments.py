"""The arguments of one call, checked."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ktconv.errors import UsageError
from ktconv.native import ChosenAdapters
from ktconv.runtime.arrays import (
    FLOATS,
    INTEGERS,
    Operand,
    new_result,
    operand,
    result,
    shape_of,
)

_SMALL_INTEGERS = ("int8", "uint8", "int16")


class Arguments(NamedTuple):
    """x and y [tokens, H] of a dtype of FLOATS, ids [tokens, top_k] int32 or int64, weights
    [tokens, top_k] and add [tokens, H] fp32, skip [E] bool. `adapters`: LoRA of its tokens."""

    tokens: int
    top_k: int
    x: Operand
    ids: Operand
    weights: Operand
    skip: Operand | None
    add: Operand | None
    y: Operand
    adapters: ChosenAdapters | None = None
    adapter_ids: Any = None  # the array that `adapters` reads


def arguments(
    hidden: int, experts: int, x: Any, ids: Any, weights: Any, skip: Any, add_to: Any, out: Any
) -> Arguments:
    """Checked arguments of `MoELayer.__call__`. UsageError names the one that does not fit."""
    shape = shape_of("x", x)
    if not shape or shape[-1] != hidden:
        raise UsageError(f"x must have the shape [..., {hidden}], got {list(shape)}")
    chosen = _expect_tokens(ids, shape)
    given = operand("x", x, shape, FLOATS)
    found = Arguments(
        shape[0] if len(shape) == 2 else prod(shape[:-1]),
        chosen[-1],
        given,
        operand("ids", ids, chosen, INTEGERS, _SMALL_INTEGERS),
        operand("weights", weights, chosen, ("fp32",), ("bf16", "fp16")),
        None if skip is None else operand("skip", skip, (experts,), ("bool",)),
        None if add_to is None else operand("add_to", add_to, shape, ("fp32",), FLOATS),
        new_result(given) if out is None else result("out", out, shape),
    )
    if out is not None:
        _expect_apart(found)
    return found


def expect_in_place(call: Arguments, given: Mapping[str, Any]) -> None:
    """UsageError for an argument, by its name, that the call does not use where it lies."""
    used = call.x, call.ids, call.weights, call.skip, call.add
    for (name, array), one in zip(given.items(), used, strict=True):
        if one is not None and one.owner is not array:
            raise UsageError(
                f"{name} would be copied once, so that later calls would not see it change",
                "give it contiguous, in a dtype that is not converted (docs/runtime.md)",
            )


def expect_not_within(name: str, array: Any, y: Operand) -> None:
    """UsageError where y overlaps an array that is read."""
    read = operand(name, array, tuple(array.shape), INTEGERS)
    if read.address < y.address + y.owner.nbytes and y.address < read.address + array.nbytes:
        raise UsageError(f"out overlaps {name} in memory", "give other memory, or no out")


def _expect_apart(call: Arguments) -> None:
    """UsageError where y overlaps what is read, unless it is x or what is added itself."""
    y = call.y
    end = y.address + y.owner.nbytes
    for index, read in enumerate((call.x, call.add, call.ids, call.weights, call.skip)):
        if read is None or read.address >= end or y.address >= read.address + read.owner.nbytes:
            continue
        if index < 2 and (y.address, y.dtype) == (read.address, read.dtype):
            continue
        name = ("x", "add_to", "ids", "weights", "skip")[index]
        raise UsageError(f"out overlaps {name} in memory", "give other memory, or no out")


def _expect_tokens(ids: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of ids, which has the tokens of x, whose `shape` is given."""
    found = shape_of("ids", ids)
    if len(found) != len(shape) or found[:-1] != shape[:-1]:
        wanted = ", ".join([*map(str, shape[:-1]), "top-k"])
        raise UsageError(
            f"ids must have the shape [{wanted}], as x is {list(shape)}; got {list(found)}"
        )
    return found
