"""Usual names for tensors that a map describes, without the code that the converter uses for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORDS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}
_BESIDE = ("scale", "packed", "zero_point", "g_idx", "shape", "global_scale", "blocks", "bias")
_OWN = ("blocks", "scales", "bias")  # of these the whole is the part's name


class MappedNames:
    """The patterns of a map, which was checked when the checkpoint was opened."""

    def __init__(self, content: str) -> None:
        read = tomllib.loads(content.replace("\r\n", "\n"))
        self._tables: Mapping[str, Mapping[str, Any]] = {
            "model": read.get("experts", {}), "mtp": read.get("mtp", {})
        }  # fmt: skip

    def of_source(self, source: str) -> Mapping[str, Any]:
        """The table for the experts `source`: order and stored are in it where they are given."""
        return self._tables["mtp" if source.startswith("mtp.") else "model"]

    def usual(self, name: str) -> str | None:
        """model.layers.3.mlp.experts.5.gate_proj.weight; None for a tensor of something else."""
        for where, one in self._tables.items():
            for word, pattern, part in _patterns(one):
                numbers, end = _match(pattern, name)
                ending = _ending(end, part, "expert" in numbers) if numbers else None
                if ending is None:
                    continue
                layer = numbers["layer"]
                layer = one["layers"][layer] if "layers" in one else layer
                module = f"{where}.layers.{layer + one.get('layer_offset', 0)}.mlp.experts."
                if "expert" in numbers:
                    module += f"{numbers['expert'] + one.get('expert_offset', 0)}."
                return f"{module}{word}{ending}"
        return None


def _patterns(one: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    for key, word in _WORDS.items():
        given = one.get(key, {})
        for part, pattern in given.items() if isinstance(given, dict) else [(None, given)]:
            yield word, pattern[: -len(".weight")] if pattern.endswith(".weight") else pattern, part


def _match(pattern: str, name: str) -> tuple[dict[str, int], str]:
    """The numbers of the placeholders, and what follows the pattern; no numbers if it differs."""
    numbers: dict[str, int] = {}
    at = 0
    while pattern:
        literal, _, rest = pattern.partition("{")
        if not name.startswith(literal, at):
            return {}, ""
        at += len(literal)
        word, _, pattern = rest.partition("}")
        if word:
            end = at
            while name[end : end + 1] in tuple("0123456789"):
                end += 1
            if not 0 < end - at <= 6:
                return {}, ""
            numbers[word] = int(name[at:end])
            at = end
    return numbers, name[at:]


def _ending(end: str, part: str | None, numbered: bool) -> str | None:
    """.weight, .weight_scale_inv and so on, or _scale_inv of a stacked one; None where it is no
    part of a weight."""
    if part is not None:
        dotted = numbered or part.startswith("weight")
        return (f".{part}" if dotted else f"_{part}") if end in ("", ".weight") else None
    if end == "":
        return ".weight"
    if end[0] == ".":
        return end if end.count(".") == 1 or end == ".weight.scale" else None
    beside = end[1:]
    if end[0] != "_" or not beside.startswith(_BESIDE):
        return None
    if not numbered:
        return end
    return f".{beside}" if beside in _OWN else f".weight_{beside}"
