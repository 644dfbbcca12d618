"""Limits that a recipe must fit."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.formats.dialects import translated
from ktconv.source import PROJECTIONS, MoELayer, Projection
from ktconv.targets.encoded.engines import ENGINES
from ktconv.targets.encoded.recipe import FIRST_ENGINE, Method
from ktconv.targets.encoded.scheme import MIXABLE, SCHEMES

# What is chosen from where nobody says otherwise: integers have the smallest errors for their
# bytes, and no rounding of activations beside.
USUAL = ("int4-g128", "int4-g64", "rawint4", "int8-g128", "bf16")
# Projections that an engine computes with one method, by engine.
_PARTS: dict[str, tuple[tuple[Projection, ...], ...]] = {
    "vllm": (PROJECTIONS,),
    "ktconv": (PROJECTIONS,),
    "compressed-tensors": (("gate",), ("up",), ("down",)),
}


class Wish(Struct, frozen=True):
    """`nbytes`: of the whole output; `bits`: per weight of the experts, with scales. One of them is
    None."""

    nbytes: int | None = None
    bits: float | None = None
    engine: str = FIRST_ENGINE
    methods: tuple[Method, ...] = ()  # the usual ones

    @property
    def words(self) -> str:
        """The wish as options."""
        if self.nbytes is not None:
            return f"--target-size {self.nbytes}"
        return f"--target-bits {self.bits:g}"

    @property
    def candidates(self) -> tuple[Method, ...]:
        if self.methods:
            return self.methods
        return tuple(method_named(name) for name in USUAL)

    @property
    def parts(self) -> Sequence[Sequence[Projection]]:
        """Projections that have one method in a layer."""
        return _PARTS[self.engine]

    def check(self) -> None:
        """UsageError for what cannot be wished."""
        if self.engine not in ENGINES:
            raise UsageError(
                f"--engine {self.engine} is not known", f"known are {', '.join(_PARTS)}"
            )
        if self.engine not in _PARTS:
            raise UsageError(
                f"--engine {self.engine} loads one method only", f"use {', '.join(_PARTS)}"
            )
        if self.bits is not None and not 0 < self.bits <= 32:
            raise UsageError(f"--target-bits {self.bits:g} must be in (0, 32]", "for example 4.6")


def method_named(text: str) -> Method:
    """A name of MIXABLE, with :GROUP where the method has several groups (W8A16:-1)."""
    name, _, size = text.partition(":")
    if name not in MIXABLE:
        name = translated(name, "method")
    if name not in MIXABLE:
        raise UsageError(
            f"--methods: {name} cannot be mixed", f"methods of recipes: {', '.join(MIXABLE)}"
        )
    groups = SCHEMES[name].groups
    if SCHEMES[name].block > 1:
        raise UsageError(
            f"--methods: the error of {name} follows from blocks of rows, which are not sampled",
            "leave it out, or write a recipe yourself",
        )
    if not size:
        return Method(name, groups[0])
    if size.removeprefix("-").isdecimal() and int(size) in groups:
        return Method(name, int(size))
    raise UsageError(
        f"--methods: {text} has a group size that {name} does not have",
        f"it has {', '.join(map(str, groups))}",
    )


def methods_named(text: str) -> tuple[Method, ...]:
    """A list of --methods."""
    return tuple(dict.fromkeys(method_named(one.strip()) for one in text.split(",")))


def fitting(methods: Sequence[Method], layers: Sequence[MoELayer]) -> dict[Method, str | None]:
    """Reasons, by method, why these layers cannot have it, None if they can."""
    found: dict[Method, str | None] = {}
    for method in methods:
        try:
            method.scheme(search=False).check(layers)
        except UsageError as error:
            found[method] = str(error)
        else:
            found[method] = None
    return found
