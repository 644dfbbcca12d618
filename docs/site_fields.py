"""Signatures of records, and tables of their fields with their comments, for the API reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_RECORD = "msgspec.Struct"
# What follows a field: its comment at the end of the line, or those in the lines above.
_COMMENT = re.compile(r"#\s(.*)$")


class RecordFields(griffe.Extension):
    """Gives each record the signature of its fields, and appends a table of those that have a
    comment to its docstring."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for cls in _classes(pkg):
            lines = [one for one in (cls, *cls.mro()) if not one.is_alias]
            if not any(_RECORD in map(_path, one.bases) for one in lines):
                continue
            fields = {one.name: one for above in reversed(lines) for one in _fields(above)}
            cls.set_member("__init__", _init(cls, list(fields.values())))
            told = {one.name: _comment(one) for one in _fields(cls) if not one.is_private}
            if any(told.values()) and cls.docstring is not None:
                rows = [f"| `{name}` | {text} |" for name, text in told.items() if text]
                table = "\n".join(["| field | meaning |", "| --- | --- |", *rows])
                cls.docstring.value += f"\n\n{table}"


def _classes(where: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    for one in list(where.members.values()):
        if isinstance(one, (griffe.Module, griffe.Class)):
            if isinstance(one, griffe.Class):
                yield one
            yield from _classes(one)


def _path(base: Any) -> str:
    """The whole name of a base class."""
    return base if isinstance(base, str) else str(base.canonical_path)


def _fields(cls: griffe.Class) -> list[griffe.Attribute]:
    """Annotated attributes, without those of the class itself."""
    attributes = [one for one in cls.members.values() if isinstance(one, griffe.Attribute)]
    usual = [one for one in attributes if "property" not in one.labels and one.annotation]
    return [one for one in usual if one.value is None or "instance-attribute" in one.labels]


def _init(cls: griffe.Class, fields: list[griffe.Attribute]) -> griffe.Function:
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for one in fields:
        owner = one.parent
        named = isinstance(owner, griffe.Class) and str(owner.keywords.get("kw_only")) == "True"
        kind = griffe.ParameterKind
        parameters.append(
            griffe.Parameter(
                one.name,
                annotation=one.annotation,
                kind=kind.keyword_only if named else kind.positional_or_keyword,
                default=_default(one.value),
            )
        )
    parameters.sort(key=lambda one: one.kind is griffe.ParameterKind.keyword_only)
    return griffe.Function(
        "__init__", parent=cls, parameters=griffe.Parameters(*parameters), returns="None"
    )


def _default(value: Any) -> Any:
    """The default of a field: what its factory is called to make, if it has one."""
    if isinstance(value, griffe.ExprCall) and value.canonical_path == "msgspec.field":
        return griffe.ExprCall(value.arguments[0].value, [])  # type: ignore[union-attr]
    return value


def _comment(field: griffe.Attribute) -> str:
    lines = field.lines_collection[field.filepath]
    last = field.endlineno or field.lineno or 1
    found = [_COMMENT.search(lines[last - 1])]
    if not found[0]:
        above = (field.lineno or 1) - 2
        while lines[above].lstrip().startswith("#"):
            found.insert(0, _COMMENT.search(lines[above]))
            above -= 1
    text = " ".join(one[1] for one in found if one)
    return text.replace("|", "\\|").replace("<", "&lt;")
