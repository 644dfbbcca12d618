"""TOML files that people write for an option: read, parsed, and checked for unknown keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError, UsageError
from ktconv.system.regular_files import MissingFileError, read_small


def read_toml(path: Path, option: str, kind: str, limit: int, hint: str) -> str:
    """The text of the file that `option` names, a `kind` ("map") of at most `limit` bytes.
    UsageError if it cannot be read or is not UTF-8 text."""
    named = f"name a {kind}, a TOML file; {hint}"
    try:
        return read_small(path.parent, path.name, limit).decode()
    except MissingFileError:
        raise UsageError(f"{option} {path} does not exist", named) from None
    except CheckpointError as error:
        raise UsageError(str(error), named) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path} is not UTF-8 text: {error.reason}", hint) from None


def parse_toml(content: str, name: str, hint: str) -> dict[str, Any]:
    """The tables in `content`, which `name` calls in a UsageError."""
    if sys.version_info >= (3, 11):  # here: most runs read no such file
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables: dict[str, Any] = tomllib.loads(content.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # also for a number of 5000 digits
        text = str(error).partition(";")[0]  # of Python's limits without advice to programmers
        raise UsageError(f"{name} is not TOML: {text[:1].lower()}{text[1:]}", hint) from None
    return tables


def unknown_key(found: Mapping[str, Any], known: Sequence[str]) -> tuple[str, str] | None:
    """The first key that is not known, and the nearest one as the end of a sentence."""
    for key in found:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, n=1)
            return key, f"; the nearest is {near[0]}" if near else ""
    return None
