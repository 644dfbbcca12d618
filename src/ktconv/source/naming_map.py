"""--map FILE.toml: the names of experts in a checkpoint whose naming ktconv does not know.

A map has patterns, one for each projection, in which {layer} and {expert} are numbers:

    [experts]
    gate = "decoder.h.{layer}.moe.w_gate.{expert}"
    up = "decoder.h.{layer}.moe.w_up.{expert}"
    down = "decoder.h.{layer}.moe.w_down.{expert}"

Here a map is read and checked; what its patterns find is in `mapped`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from msgspec import Struct, field

from ktconv.errors import UsageError
from ktconv.families import table
from ktconv.families.config import text_section
from ktconv.families.names import RouterTensors, SharedExpert
from ktconv.source.toml_file import parse_toml, read_toml, unknown_key

Order = Literal["gate first", "up first", "interleaved"]
Stored = Literal["out-in", "in-out"]

PLACEHOLDERS = ("layer", "expert")
PROJECTION_KEYS = ("gate", "up", "down", "gate_up")
# The keys of [others], by the fields of names.RouterTensors and names.SharedExpert.
ROUTER_KEYS: Mapping[str, str] = {
    name: {"weight": "router", "correction": "correction"}.get(name, f"router_{name}")
    for name in RouterTensors.__struct_fields__
}
SHARED_KEYS: Mapping[str, str] = {name: f"shared_{name}" for name in SharedExpert.__struct_fields__}
OTHER_KEYS = (*ROUTER_KEYS.values(), "norm", *SHARED_KEYS.values())
_EXPERT_KEYS = (
    *PROJECTION_KEYS, "order", "stored", "encoding", "layers", "layer_offset", "expert_offset",
)  # fmt: skip
_TOP_KEYS = ("like", "undecided", "experts", "others", "mtp", "mtp_others", "config")
_OTHERS = {"experts": "others", "mtp": "mtp_others"}
_MAX_MAP_BYTES = 1 << 20
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_NUMBER = "[0-9]{1,6}"
_HINT = "see docs/maps.md; `ktconv inspect MODEL --explain` prints a map to start from"


class Pattern(Struct, frozen=True):
    """The name of a tensor with {layer} and perhaps {expert}; without the .weight at its end."""

    text: str
    regex: re.Pattern[str]  # a whole name: layer, expert, and in `end` what follows the pattern

    @property
    def numbered(self) -> bool:
        """Whether each expert has a tensor of its own."""
        return "{expert}" in self.text

    def name(self, layer: int, expert: int = 0) -> str:
        """The name with these numbers, which are those of the name."""
        return self.text.replace("{layer}", str(layer)).replace("{expert}", str(expert))


class ExpertNames(Struct, frozen=True):
    """The table [experts], or [mtp], whose layers are those for multi-token prediction."""

    in_mtp: bool
    # Key of PROJECTION_KEYS -> part of the encoding -> pattern; part None: all, by their endings.
    patterns: Mapping[str, Mapping[str | None, Pattern]]
    others: Mapping[str, Pattern] = field(default_factory=dict)  # [others] or [mtp_others]
    order: Order | None = None
    stored: Stored | None = None
    encoding: str | None = None
    layers: Sequence[int] | None = None  # of the model, for each number in names
    layer_offset: int = 0  # added to numbers in names
    expert_offset: int = 0

    @property
    def table(self) -> str:
        return "mtp" if self.in_mtp else "experts"

    @property
    def all_patterns(self) -> Iterable[Pattern]:
        return chain.from_iterable(parts.values() for parts in self.patterns.values())

    @property
    def others_table(self) -> str:
        return _OTHERS[self.table]


class NamingMap(Struct, frozen=True, dict=True):
    """A checked map."""

    content: str  # of the file
    like: str | None = None  # the model_type whose router and activation the model has
    config: Mapping[str, Any] = field(default_factory=dict)  # settings besides config.json's
    undecided: Sequence[str] = ()  # what a guessed map leaves to its user
    experts: ExpertNames | None = None
    mtp: ExpertNames | None = None

    @property
    def tables(self) -> Sequence[ExpertNames]:
        return [one for one in (self.experts, self.mtp) if one is not None]

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Record for the manifest; `map_of_record` reads it."""
        return {"sha256": self.sha256, "toml": self.content.split("\n")}

    def applied(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with this map's settings in its text section."""
        settings = {**({"model_type": self.like} if self.like else {}), **self.config}
        return _with(config, text_section(config), settings) if settings else config


def _with(
    section: Mapping[str, Any], text: Mapping[str, Any], settings: Mapping[str, Any]
) -> Mapping[str, Any]:
    if section is text:
        return {**section, **settings}
    inner = {
        key: _with(value, text, settings)
        for key, value in section.items()
        if isinstance(value, dict) and (value is text or _contains(value, text))
    }
    return {**section, **inner}


def _contains(section: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    return any(
        value is text or (isinstance(value, dict) and _contains(value, text))
        for value in section.values()
    )


def read_map(path: Path | NamingMap | None) -> NamingMap | None:
    """The map in the file `path`; what is no path unchanged. UsageError naming the line for what is
    wrong, and for a guessed map whose open questions nobody has answered: a wrong guess of gate and
    up gives weights that no comparison with the source finds."""
    if path is None or isinstance(path, NamingMap):
        return path
    found = parse_map(read_toml(path, "--map", "map", _MAX_MAP_BYTES, _HINT), f"--map {path}")
    if found.undecided:
        raise UsageError(
            f"--map {path} has something undecided: {found.undecided[0]}",
            "correct the lines of the map if the model's code has it otherwise, then remove "
            "`undecided` from it.",
        )
    return found


def map_of_record(record: object) -> NamingMap | None:
    """The map that a manifest's entry about the source has; None if there is none."""
    entry = record.get("map") if isinstance(record, dict) else None
    lines = entry.get("toml") if isinstance(entry, dict) else None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return None
    return parse_map("\n".join(lines), "the map in the manifest")


def parse_map(content: str, name: str) -> NamingMap:
    """Raises UsageError in which `name` says where the map is from."""
    return _Parser(content, name).map(parse_toml(content, name, _HINT))


class _Parser:
    """Reader from TOML to a NamingMap; every error names the line."""

    def __init__(self, content: str, name: str) -> None:
        self._content, self._name = content, name

    def map(self, tables: Mapping[str, Any]) -> NamingMap:
        self._check_keys("", tables, _TOP_KEYS)
        experts, mtp = (self._experts(tables, key) for key in ("experts", "mtp"))
        if experts is None and mtp is None:
            raise UsageError(f"{self._name} has no table [experts]", _HINT)
        return NamingMap(
            content=self._content,
            like=self._like(tables),
            config=self._config(tables),
            undecided=self._undecided(tables),
            experts=experts,
            mtp=mtp,
        )

    def _fail(self, table: str, key: str, what: str, hint: str = _HINT) -> NoReturn:
        place = f"{self._name}{self._line(table, key)}: "
        where = f"[{table}] {key}".strip() if table else key
        raise UsageError(f"{place}{where} {what}", hint)

    def _line(self, table: str, key: str) -> str:
        """ ", line 3" of the key in this table, or of the table; nothing where it is not found."""
        current, header = "", None
        for number, line in enumerate(self._content.split("\n"), start=1):
            if match := re.match(r"\s*\[\s*([\w.\"'-]+)\s*\]", line):
                current = match[1].strip("\"'")
                if current.partition(".")[0] == table and header is None:
                    header = number
            inside = current.partition(".")[0] == table
            dotted = rf"\s*{re.escape(table)}\s*\.\s*" if table and not current else r"\s*"
            if (inside or (table and not current)) and re.match(
                rf"{dotted}[\"']?{re.escape(key)}[\"']?\s*[.=]", line
            ):
                return f", line {number}"
            if current == f"{table}.{key}":
                return f", line {number}"
        return f", line {header}" if header else ""

    def _check_keys(self, name: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
        if (unknown := unknown_key(found, known)) is not None:
            key, guess = unknown
            self._fail(name, key, f"is not a key of a map{guess}", f"known are {', '.join(known)}")

    def _table(self, tables: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
        found = tables.get(name)
        if found is not None and not isinstance(found, dict):
            self._fail("", name, f"must be a table, [{name}]")
        return found

    def _experts(self, tables: Mapping[str, Any], name: str) -> ExpertNames | None:
        found = self._table(tables, name)
        if found is None:
            if _OTHERS[name] in tables:
                self._fail("", _OTHERS[name], f"belongs to [{name}], which is not there")
            return None
        self._check_keys(name, found, _EXPERT_KEYS)
        patterns = {
            key: self._patterns(name, key, found[key]) for key in PROJECTION_KEYS if key in found
        }
        self._check_projections(name, patterns)
        return ExpertNames(
            in_mtp=name == "mtp",
            patterns=patterns,
            others=self._others(tables, _OTHERS[name]),
            order=self._order(name, found, patterns),
            stored=self._choice(name, found, "stored", get_args(Stored)),
            encoding=self._text(name, found, "encoding"),
            layers=self._layers(name, found),
            layer_offset=self._whole(name, found, "layer_offset"),
            expert_offset=self._whole(name, found, "expert_offset"),
        )

    def _check_projections(self, name: str, patterns: Mapping[str, Any]) -> None:
        for key in ("up", "gate"):
            if "gate_up" in patterns and key in patterns:
                self._fail(name, key, "and gate_up are both given: the second includes the first")
        first = "gate_up" if "gate_up" in patterns else "up"
        for key in (first, "down"):
            if key not in patterns:
                self._fail(name, "", f"has no {key}")
        kinds = {
            key: pattern.numbered for key, parts in patterns.items() for pattern in parts.values()
        }
        if len(set(kinds.values())) > 1:
            without = next(key for key, numbered in kinds.items() if not numbered)
            self._fail(name, without, "has no {expert}, but others of the table have it")

    def _patterns(self, name: str, key: str, value: Any) -> Mapping[str | None, Pattern]:
        """One pattern for all tensors of a weight, or one for each part of its encoding."""
        if isinstance(value, dict):
            if not value:
                self._fail(name, key, "is empty")
            return {part: self._pattern(name, key, text, True) for part, text in value.items()}
        return {None: self._pattern(name, key, value, True)}

    def _pattern(self, name: str, key: str, value: Any, experts: bool) -> Pattern:
        if not isinstance(value, str) or not value:
            self._fail(name, key, f"must be a name with {{layer}}, not {_short(value)}")
        used = [match[1] for match in _PLACEHOLDER.finditer(value)]
        allowed = PLACEHOLDERS if experts else PLACEHOLDERS[:1]
        for word in used:
            if word not in allowed:
                these = " and ".join(f"{{{one}}}" for one in allowed)
                self._fail(name, key, f"has {{{word}}}; placeholders are {these}")
            if used.count(word) > 1:
                self._fail(name, key, f"has {{{word}}} twice")
        if "layer" not in used:
            self._fail(name, key, f"has no {{layer}}: {_short(value)}")
        literals = _PLACEHOLDER.split(value)[::2]
        if any("{" in text or "}" in text for text in literals):
            self._fail(name, key, f"has a brace that belongs to no placeholder: {_short(value)}")
        if any(text[:1] in ("", *"0123456789") for text in literals[1:-1]) or (
            literals[-1][:1].isdecimal()
        ):
            self._fail(name, key, "needs text that begins with no digit behind each placeholder")
        text = value.removesuffix(".weight")
        pieces = _PLACEHOLDER.split(text)
        regex = "".join(
            f"(?P<{piece}>{_NUMBER})" if index % 2 else re.escape(piece)
            for index, piece in enumerate(pieces)
        )
        return Pattern(text, re.compile(rf"{regex}(?P<end>[._](?:.+))?", re.DOTALL))

    def _order(
        self, name: str, found: Mapping[str, Any], patterns: Mapping[str, Any]
    ) -> Order | None:
        order: Order | None = self._choice(name, found, "order", get_args(Order))
        if order is not None and "gate_up" not in patterns:
            self._fail(name, "order", "belongs to gate_up, which is not given")
        if order is None and "gate_up" in patterns:
            # Shapes do not show it, and no comparison with the source would.
            choices = ", ".join(f'"{one}"' for one in get_args(Order))
            self._fail(
                name, "gate_up", "needs order, which names do not show", f"give one of {choices}"
            )
        return order

    def _choice(self, name: str, found: Mapping[str, Any], key: str, choices: Sequence[str]) -> Any:
        value = found.get(key)
        if value is not None and value not in choices:
            these = " or ".join(f'"{one}"' for one in choices)
            self._fail(name, key, f"must be {these}, not {_short(value)}")
        return value

    def _text(self, name: str, found: Mapping[str, Any], key: str) -> str | None:
        value = found.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            self._fail(name, key, f"must be a text, not {_short(value)}")
        return value

    def _whole(self, name: str, found: Mapping[str, Any], key: str) -> int:
        value = found.get(key, 0)
        if type(value) is not int or abs(value) >= 10**6:
            self._fail(name, key, f"must be a whole number, not {_short(value)}")
        return value

    def _layers(self, name: str, found: Mapping[str, Any]) -> Sequence[int] | None:
        value = found.get("layers")
        if value is None:
            return None
        if "layer_offset" in found:
            self._fail(name, "layers", "and layer_offset are both given")
        whole = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
        if not whole or not value or len(set(value)) < len(value):
            self._fail(
                name, "layers", "must list the model's layer for each number in names, each once"
            )
        return tuple(value)

    def _others(self, tables: Mapping[str, Any], name: str) -> Mapping[str, Pattern]:
        found = self._table(tables, name) or {}
        self._check_keys(name, found, OTHER_KEYS)
        return {key: self._pattern(name, key, text, False) for key, text in found.items()}

    def _like(self, tables: Mapping[str, Any]) -> str | None:
        like = self._text("", tables, "like")
        if like is not None and table.FAMILIES.of(like) is None:
            known = sorted(kind for row in table.FAMILIES.rows for kind in row.types)
            near = difflib.get_close_matches(like, known, n=3) or known
            self._fail(
                "",
                "like",
                f"is {_short(like)}, which is no model_type that ktconv knows",
                f"known are {', '.join(near[:12])}{' ...' if len(near) > 12 else ''}",
            )
        return like

    def _undecided(self, tables: Mapping[str, Any]) -> Sequence[str]:
        found = tables.get("undecided", [])
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            self._fail("", "undecided", f"must be a list of texts, not {_short(found)}")
        return found

    def _config(self, tables: Mapping[str, Any]) -> Mapping[str, Any]:
        found = self._table(tables, "config") or {}
        known = [key for setting in table.KEYS for key in table.FAMILIES.keys(setting)]
        for key, value in found.items():
            if key == "model_type":
                self._fail("config", key, "cannot be given here", 'write like = "..." instead')
            if key not in known or key in table.FAMILIES.keys("text section"):
                near = difflib.get_close_matches(key, known, n=1)
                guess = f"; the nearest is {near[0]}" if near else ""
                self._fail(
                    "config", key, f"is no setting that ktconv reads from config.json{guess}"
                )
            if not isinstance(value, (bool, int, float, str, list)):
                self._fail(
                    "config", key, f"has the value {_short(value)}, which JSON does not have"
                )
        return found


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 80 else f"{text[:77]}..."
