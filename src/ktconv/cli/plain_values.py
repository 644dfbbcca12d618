"""Values of options that are what they should be already, without typer's way of checking them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

_WHOLE = re.compile("[0-9]{1,15}")


class PlainValues:
    """In place of typer's conversion of a parameter's value, where typer does that by pydantic,
    whose import takes a fifth of the time in which a command starts. Whatever is not plainly right
    is left to typer: its messages stay."""

    def __init__(self, param: Any) -> None:
        self._typer, self._about = param.get_runtime_param, param.type_descriptor

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value as the command gets it; raises what typer raises."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        kind, about = self._about.annotation, self._about.parameter_info
        if kind == list[str] and isinstance(value, list | tuple):
            if all(map(_is_text, value)):
                return list(value)
        elif _is_plain(kind, value, about):
            return value
        elif kind is int and isinstance(value, str) and _WHOLE.fullmatch(value):
            if _within(int(value), about):
                return int(value)
        elif kind is Path and isinstance(value, str) and _may_be_read(value, about):
            return Path(value)
        return self._typer().coerce(value, param=param, ctx=ctx)


def _is_text(value: Any) -> bool:
    return type(value) is str and value.isprintable()


def _is_plain(kind: Any, value: Any, about: Any) -> bool:
    """Whether a value has its type, and is in its limits."""
    if about.parser is not None:
        return False
    if kind is str:
        return _is_text(value)
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if kind in (int, float):
        return type(value) is kind and _within(value, about)
    return kind is Path and isinstance(value, Path)


def _within(value: float, about: Any) -> bool:
    least, most = about.min, about.max
    return (least is None or value >= least) and (most is None or value <= most)


def _may_be_read(value: str, about: Any) -> bool:
    """Whether a path is nothing that typer refuses, or makes another one."""
    special = about.exists or about.resolve_path or about.writable or about.allow_dash
    if special or about.path_type or not (about.file_okay and about.dir_okay):
        return False
    return _is_text(value) and (os.access(value, os.R_OK) or not os.path.lexists(value))


def converted_plainly(params: list[Any]) -> list[Any]:
    """The parameters, with `PlainValues` where this typer converts by pydantic."""
    for param in params:
        known = hasattr(param, "get_runtime_param") and hasattr(param, "type_descriptor")
        if known and "get_runtime_param" not in vars(param):
            plain = PlainValues(param)
            param.get_runtime_param = lambda plain=plain: plain
    return params
