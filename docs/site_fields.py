"""Tables of the fields of dataclasses, with their comments, for the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

# What follows a field: its comment at the end of the line, or those in the lines above.
_COMMENT = re.compile(r"#\s(.*)$")


class FieldComments(griffe.Extension):
    """Appends the table to the docstring of each dataclass that has a comment on a field."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if not any("dataclass" in str(one.value) for one in cls.decorators):
            return
        fields = [one for one in cls.attributes.values() if not one.is_private]
        told = {one.name: _comment(one) for one in fields}
        if any(told.values()) and cls.docstring is not None:
            rows = [f"| `{name}` | {text} |" for name, text in told.items() if text]
            table = "\n".join(["| field | meaning |", "| --- | --- |", *rows])
            cls.docstring.value += f"\n\n{table}"


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
