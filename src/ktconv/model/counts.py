"""Models whose layers have different numbers of experts, which transformers builds for one number.

Its classes take the number from the config of the whole model. While such a model is built, the
blocks of its layers get a config of their own.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ktconv.families import table
from ktconv.model.sites import find_experts


@contextmanager
def built_with(model: nn.Module, counts: Mapping[int, int]) -> Iterator[None]:
    """Build models of the kind of `model` with `counts` experts per layer, in this context.

    Build one model at a time: blocks are assigned to layers in the order of their construction."""
    sites = find_experts(model)
    waiting: list[int | None] = []

    def wrapped(kind: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def build(self: nn.Module, *args: Any, **named: Any) -> None:
            if type(self) is not kind:
                return original(self, *args, **named)
            if not waiting:
                waiting.extend(counts.get(layer) for layer in sorted(sites))
            bound, count = signature.bind(self, *args, **named), waiting.pop(0)
            if count is not None and "config" in bound.arguments:
                bound.arguments["config"] = _narrowed(bound.arguments["config"], count)
            return original(*bound.args, **bound.kwargs)

        return build

    with ExitStack() as stack:
        for kind in {type(site.parent) for site in sites.values()}:
            own = kind.__init__
            stack.callback(setattr, kind, "__init__", own)
            setattr(kind, "__init__", wrapped(kind, own))  # noqa: B010 - mypy refuses the usual way
        yield


def _narrowed(config: Any, count: int) -> Any:
    """A config with this number of experts."""
    narrowed = copy.copy(config)
    for key in table.FAMILIES.keys("experts"):
        if type(vars(narrowed).get(key)) is int:
            setattr(narrowed, key, count)
    return narrowed
