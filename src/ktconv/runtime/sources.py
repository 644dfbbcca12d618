"""Weights of layers to call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ktconv.errors import UsageError
from ktconv.moe import Experts
from ktconv.moe.converted import open_converted
from ktconv.moe.load import moe_layers


def loaded(path: Path, layer: int | None, method: str | None, parts: int | None) -> Experts:
    """A layer of a converted model. UsageError where it has another method or number of parts."""
    experts = open_converted(path, layer)
    for what, wanted, found in (
        ("method", method, experts.format.key),
        ("number of parts", parts, experts.parts),
    ):
        if wanted not in (None, found):
            raise UsageError(
                f"the {what} of {path} is {found}, not {wanted}",
                "leave it out, or convert the model again",
            )
    return experts


def loaded_all(path: Path) -> Iterator[tuple[int, Experts]]:
    """Every layer of a converted model."""
    for number in moe_layers(path):
        yield number, open_converted(path, number)
