"""Calls from code that torch.compile traces."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps torch.compile out of a function that calls C: it runs as it is, between the parts of
    its caller that are compiled."""

    kept_out: dict[Any, Callable[_P, _R]] = {}

    @wraps(function)
    def call(*given: _P.args, **named: _P.kwargs) -> _R:
        compiler = sys.modules.get("torch._dynamo")  # takes seconds to load, so it is not imported
        if compiler is None:
            return function(*given, **named)
        found = kept_out.get(compiler)
        if found is None:
            found = kept_out[compiler] = compiler.disable(function)
        return found(*given, **named)

    return call
