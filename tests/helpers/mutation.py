"""Damaged JSON and safetensors files, from a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

HOSTILE = "a\x1b[31m\r\n\u202e\x07\0"
# In place of a string: JSON that Python's writer would not write.
_RAW = {
    "@huge": "9" * 5000,
    "@float": "1" + "0" * 400 + ".5",
    "@deep": "[" * 2000 + "]" * 2000,
    "@deeper": '{"a":' * 200_000 + "1" + "}" * 200_000,
    "@half": '"\\ud800"',
    "@wrong": "{,}",
}
_TWICE = "@twice"
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 128, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e300,
    float("nan"), float("-inf"), "", " ", "0", "-1", "1.5", "true", HOSTILE, "../x", "/etc/passwd",
    "x" * 5000, "\u00e9\U0001f600", [], {}, [[]], [None], [-1], [0] * 3, ["a", 1], {"": ""},
    {"a": {"b": []}}, {HOSTILE: HOSTILE}, "BF16", "F4", "F64", "I8", "BOOL", *_RAW,
)  # fmt: skip


def mutated(value: Any, rng: random.Random) -> tuple[bytes, str]:
    """A copy of a JSON document with one to three changes, as bytes, and what was changed."""
    value, told = json.loads(json.dumps(value)), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value, words = _changed(value, rng)
        told.append(words)
    text = json.dumps(value)
    for marker, raw in _RAW.items():
        text = text.replace(json.dumps(marker), raw)
    data = text.replace(f'{_TWICE}"', '"').encode()
    if rng.random() < 0.05:
        data, words = damaged(data, rng)
        told.append(words)
    return data, "; ".join(told)


def mutated_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The bytes of a safetensors file with a changed header or damaged bytes."""
    if rng.random() < 0.1:
        return damaged(data, rng)
    end = 8 + int.from_bytes(data[:8], "little")
    header, told = mutated(json.loads(data[8:end]), rng)
    return len(header).to_bytes(8, "little") + header + data[end:], told


def damaged(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A few bytes changed, or an end cut off or added."""
    at = rng.randrange(min(len(data), rng.choice((9, 400, len(data))))) if data else 0
    piece = rng.choice((b"", b"\0", b"\xff\xfe", b"\x1b", b'"', b"}", b"[" * 9, bytes(8)))
    cut = rng.choice((0, 1, 8, len(data)))
    return data[:at] + piece + data[at + cut :], f"{cut} bytes at {at} become {piece!r}"


def _changed(document: Any, rng: random.Random) -> tuple[Any, str]:
    places = list(_places(document))
    if not places or rng.random() < 0.01:
        odd = rng.choice(ODD)
        return odd, f"all becomes {odd!r:.60}"
    holder, key = rng.choice(places)
    odd, action = deepcopy(rng.choice(ODD)), rng.randrange(10)
    words = f"{key!r:.60}: {holder[key]!r:.60} becomes {odd!r:.60}"
    if action == 0:
        del holder[key]
        return document, f"without {key!r:.60}"
    if action == 1:
        holder[key] = [holder[key]]
        return document, f"{key!r:.60} in a list"
    if action == 2 and isinstance(holder, dict):
        new = rng.choice(("", HOSTILE, "0", "-1", "x" * 300, "\u00e9", "a.b", "../x", f"{key}x"))
        holder[new] = holder.pop(key)
        return document, f"{key!r:.60} renamed {new!r:.60}"
    if action == 3 and isinstance(holder, dict):
        holder[f"{key}{_TWICE}"] = rng.choice((odd, holder[key]))
        return document, f"{key!r:.60} twice, with {odd!r:.60}"
    if action == 4:
        other, other_key = rng.choice(places)
        if other_key in (other if isinstance(other, dict) else range(len(other))):
            holder[key] = json.loads(json.dumps(other[other_key]))
            return document, f"{key!r:.60} becomes that of {other_key!r:.60}"
    if action == 5 and isinstance(holder[key], int):
        holder[key] += rng.choice((-1, 1, 7, -(10**6), 10**6, 2**62))
        return document, f"{key!r:.60} becomes {holder[key]}"
    holder[key] = odd
    return document, words


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(inner)
