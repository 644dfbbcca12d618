"""Differences between two versions of a side file that matter to a model.

Tools that save a tokenizer again rewrite its files. Differences in layout, or in information about
the tool, do not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ktconv.checkpoint.config import CONFIG_NAME
from ktconv.verify.config_differences import config_differences, differences, flat

# Written anew in another form whenever a tokenizer is saved: differences do not matter.
_REWRITTEN = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_DECIDING = (".py", ".jinja", ".txt", ".model", ".tiktoken")
_UNUSED = {
    "generation_config.json": ("transformers_version", "_from_model_config"),
    "tokenizer.json": ("version", "padding", "truncation"),
    "vocab.json": (),
}
_REGEX = ("use_regex", True)


def content_differences(name: Path, here: bytes, there: bytes, other: str) -> list[str] | None:
    """Differences that affect a model's input or output: "temperature is 1, but 2 in the source".

    None for a file that ktconv does not know. `other` ends the sentences.
    """
    if name.name in _REWRITTEN:
        return None
    if name.name != CONFIG_NAME and name.name not in _UNUSED:
        return ["its bytes differ"] if name.suffix in _DECIDING else None
    try:
        one, two = json.loads(here), json.loads(there)
        if not isinstance(one, dict) or not isinstance(two, dict):
            return ["it is not a JSON object"]
        if name.name == CONFIG_NAME:
            return config_differences(one, two, other)
        return _differences(name.name, one, two, other)
    except (ValueError, RecursionError):
        return ["it cannot be compared as JSON"]


def _differences(
    name: str, here: Mapping[str, Any], there: Mapping[str, Any], other: str
) -> list[str]:
    spelled: Callable[[Any], Any] = _tokenizer if name == "tokenizer.json" else dict
    a, b = (
        {key: value for key, value in spelled(content).items() if key not in _UNUSED[name]}
        for content in (here, there)
    )
    return differences(flat(a), flat(b), other)


def _tokenizer(value: Any, key: str = "") -> Any:
    """tokenizer.json in one spelling: newer versions add flags with default values, and write a
    merge as a pair."""
    if isinstance(value, dict):
        return {
            name: _tokenizer(inner, name)
            for name, inner in value.items()
            if key == "vocab" or not (inner in (None, False, "") or (name, inner) == _REGEX)
        }
    if not isinstance(value, list):
        return value
    if key == "merges":
        return [" ".join(map(str, one)) if isinstance(one, list) else one for one in value]
    return [_tokenizer(one) for one in value]
