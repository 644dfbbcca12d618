"""Python files as trees, which several tests read."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache  # the whole package takes seconds
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))
