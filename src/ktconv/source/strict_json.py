"""JSON from files that we do not trust: safetensors headers, indexes, configs."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ktconv.errors import CheckpointError
from ktconv.system.regular_files import MAX_CONFIG_BYTES, read_small

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped: a pair is sound, half of one is not
_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_Pairs = list[tuple[str, Any]]
_MAX_DEPTH = 64  # objects within objects


def parse_object(
    data: bytes, source: str, hint: str, *, allow_same_twice: bool = False
) -> dict[str, Any]:
    """Parse `data` as one JSON object; `source` names it in errors.

    A key that occurs twice is an error, because readers disagree on which value
    counts; with `allow_same_twice` only if the values differ.
    Raises CheckpointError with `hint` for whatever is wrong.
    """
    if data.startswith(_ORDER_MARKS):
        raise CheckpointError(
            f"{source} begins with a byte order mark, which readers of JSON refuse",
            "Save it as UTF-8 without a byte order mark.",
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source} is not UTF-8 text at byte {error.start}", hint) from None
    try:
        value = _flat(text)
        if value is None:
            value = json.loads(text, object_pairs_hook=_unique_keys(source, hint, allow_same_twice))
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise CheckpointError(f"{source} is nested too deeply to be read", hint) from None
    except UnicodeEncodeError:  # no file name and no terminal takes such a string
        raise CheckpointError(f"{source} contains text that is not valid Unicode", hint) from None
    except ValueError as error:
        what = str(error).partition(";")[0]  # of Python's limits without advice to programmers
        raise CheckpointError(f"{source} is not valid JSON: {what}", hint) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} is not a JSON object but {_kind(value)}", hint)
    return value


def _flat(text: str) -> dict[str, Any] | None:
    """The object in `text`, where counting proves that no key occurs twice: headers and indexes, as
    a rule. None for any other text.

    Each object has a brace and each key a colon, and strings can only add to both: with no more
    braces than objects were kept, and no more colons than keys, nothing was replaced. A hook that
    is called for each object would take half as long again.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    inner = [len(one) for one in value.values() if type(one) is dict]
    unique = text.count("{") == 1 + len(inner) and text.count(":") == len(value) + sum(inner)
    return value if unique else None


class JsonFile(NamedTuple):
    """An object, and the file's bytes that it was read from."""

    content: dict[str, Any]
    data: bytes


def read_object(
    directory: Path,
    name: str,
    hint: str,
    limit: int = MAX_CONFIG_BYTES,
    *,
    allow_same_twice: bool = True,
) -> JsonFile:
    """Read the object in a file next to the weights.

    Raises as `parse_object`, and for an object with too many levels for recursive functions; as
    `read_small` for a file that is missing or too large.
    """
    data, source = read_small(directory, name, limit), str(directory / name)
    content = parse_object(data, source, hint, allow_same_twice=allow_same_twice)
    if _is_deep(content):
        raise CheckpointError(f"{source} is nested too deeply to be read", hint)
    return JsonFile(content, data)


def _is_deep(content: dict[str, Any]) -> bool:
    """Whether it has too many levels for recursive functions."""
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [value for one in inner for value in one if isinstance(value, (dict, list))]
    return bool(level)


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return "a list"
    return "a string" if isinstance(value, str) else "a number"


def _unique_keys(
    source: str, hint: str, allow_same_twice: bool
) -> Callable[[_Pairs], dict[str, Any]]:
    def build(pairs: _Pairs) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            key = _repeated_key(pairs, allow_same_twice)
            if key is not None:
                raise CheckpointError(f"{source} contains the key {key!r} twice", hint)
        return result

    return build


def _repeated_key(pairs: _Pairs, allow_same_twice: bool) -> str | None:
    """The first key that occurs again (with another value, if equal ones are allowed)."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen and not (allow_same_twice and seen[key] == value):
            return key
        seen[key] = value
    return None
