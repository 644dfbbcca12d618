"""Facts that an output's model card takes over from its source: the hub's id, licence and
languages.

The card of a source is a README.md that anybody can have written. Of the YAML at its top only the
plainest forms are read (`key: value`, lists, quotes), and of these only values that the hub allows;
everything else counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.source.hub_cache import HUB_ID, cached_place
from ktconv.source.side_files import CARD, is_legal, list_side_files
from ktconv.source.types import Checkpoint
from ktconv.system.pointers import PointerError
from ktconv.system.regular_files import read_small

MAX_CARD_BYTES = 16 << 20
_MAX_VALUES = 200  # of a list: some models name a hundred languages

_URL = re.compile(r"hf://(?P<id>[^/@:]+/[^/@:]+)(?:[@/:].*)?")
_WORD = re.compile(r"[a-z0-9][a-z0-9.-]*")
_LINE = re.compile(r"[\w .,:;()/+&'-]{1,200}", re.ASCII)
_LINK = re.compile(r"https?://[\w.~:/?#@!$&()*+,;=%-]+|[\w./-]+", re.ASCII)
_ENCODING = {"quantization_config", "compression_config"}
_ALLOWED = {
    "base_model": HUB_ID,
    "license": _WORD,
    "license_name": _LINE,
    "license_link": _LINK,
    "language": re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]+)*|multilingual|code"),
    "pipeline_tag": _WORD,
}

_ENTRY = re.compile(r"(?P<key>[A-Za-z_][\w-]*):(?:[ \t]+(?P<value>.*))?", re.ASCII)
_ITEM = re.compile(r"[ \t]*-[ \t]+(?P<value>.*)")
# Plain words of YAML that are no strings.
NOT_STRINGS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


class SourceCard(Struct, frozen=True):
    """Facts of a source; empty where nothing is known."""

    name: str | None = None  # org/name of the source itself
    argument: str | None = None  # what commands find exactly this state of it by
    base_model: tuple[str, ...] = ()  # that, or what the source was made from: ids of the hub
    license: tuple[str, ...] = ()
    license_name: tuple[str, ...] = ()
    license_link: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    pipeline_tag: tuple[str, ...] = ()


def source_card(checkpoint: Checkpoint, model: str) -> SourceCard:
    """Facts of the source that `model`, an argument of the command, names.

    ResourceError where its README.md is there and the system, or a server, does not let us read
    it; one that is no text, or none at all, says nothing.
    """
    directory = checkpoint.side_directory or _directory(checkpoint.path)
    found = _read(directory)
    identity = hub_id(model, checkpoint.path)
    base = (identity,) if identity else found.get("base_model", ())
    link = found.get("license_link", ())[:1]
    if link and "://" not in link[0] and not _is_copied(directory, link[0]):
        link = (f"https://huggingface.co/{identity}/blob/main/{link[0]}",) if identity else ()
    return SourceCard(
        name=identity,
        argument=_argument(model, checkpoint.path, identity),
        base_model=base,
        license=found.get("license", ()),
        license_name=found.get("license_name", ())[:1],
        license_link=link,
        language=found.get("language", ()),
        pipeline_tag=found.get("pipeline_tag", ())[:1] or _task(checkpoint),
    )


def hub_id(model: str, path: Path) -> str | None:
    """org/name of a model given as hf://org/name, or whose files are in the hub's cache."""
    if (url := _URL.fullmatch(model)) and HUB_ID.fullmatch(url["id"]):
        return url["id"]
    place = cached_place(path)
    return None if place is None else place.id


def _argument(model: str, path: Path, identity: str | None) -> str | None:
    """The URL of the commit of a repository of the hub; None for what is not on the hub."""
    if identity is None:
        return None
    from ktconv.source.remote.mirror import pinned
    from ktconv.source.remote.urls import is_url

    if is_url(model):
        return pinned(model)
    place = cached_place(path)
    if place is None or place.commit is None:
        return identity
    file = f":{'/'.join(place.inside)}" if place.inside else ""
    return f"hf://{identity}@{place.commit}{file}"


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _read(directory: Path) -> dict[str, tuple[str, ...]]:
    try:
        return front_matter(read_small(directory, CARD, MAX_CARD_BYTES).decode(errors="replace"))
    except PointerError:  # its licence is not absent
        raise
    except CheckpointError:
        return {}


def _is_copied(directory: Path, name: str) -> bool:
    """Whether the output gets this file of the source, so that a link to it leads there."""
    return is_legal(Path(name)) and Path(name) in list_side_files(directory)


def _task(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Models with other inputs than text have other tasks, which only their card names."""
    keys = checkpoint.config.keys()
    others = any(key.endswith("_config") and key not in _ENCODING for key in keys)
    return () if others or checkpoint.tower else ("text-generation",)


# ---- the YAML at the top of a card ----------------------------------------------------------


def front_matter(text: str) -> dict[str, tuple[str, ...]]:
    """The values of those keys that cards take over, by key. A key with anything else than a
    string, or strings in a list, that its place allows is left out."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    ends = (number for number, line in enumerate(lines[1:], 1) if line.rstrip() == "---")
    block = lines[1 : next(ends, 1)]
    found: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for key, values in _entries(block):
        if key in seen:  # libraries differ in which of the two they take
            found.pop(key, None)
        elif key in _ALLOWED and values and len(values) <= _MAX_VALUES:
            fit = [value for value in values if value and _ALLOWED[key].fullmatch(value)]
            if len(fit) == len(values):
                found[key] = tuple(fit)
        seen.add(key)
    return found


def _entries(lines: Sequence[str]) -> Iterator[tuple[str, list[str | None]]]:
    """Keys of the outermost level with their values; None for a value of another form."""
    key, values = "", list[str | None]()
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if match := _ENTRY.fullmatch(line):
            yield key, values
            key, values = match["key"], list(_values((match["value"] or "").strip()))
        elif match := _ITEM.fullmatch(line):
            values.append(_scalar(match["value"].strip()))
        else:
            values.append(None)
    yield key, values


def _values(text: str) -> Iterator[str | None]:
    """Values behind a key on its line: nothing, a list in brackets, or one scalar."""
    if text.startswith("#") or not text:
        return
    if inside := re.fullmatch(r"\[([^\[\]{}#]*)\]", text):
        yield from (_scalar(part.strip()) for part in inside[1].split(",") if part.strip())
    else:
        yield _scalar(text)


def _scalar(text: str) -> str | None:
    """A string, plain or in quotes without escapes; None for anything else in YAML."""
    text = re.split(r"\s+#", text, maxsplit=1)[0]
    if quoted := re.fullmatch(r"\"([^\"\\]*)\"|'([^']*)'", text):
        return quoted[1] if quoted[1] is not None else quoted[2]
    plain = re.match(r"[A-Za-z0-9]", text) and not re.search(r": |:$|[\"'{}\[\]|>&*!%`]", text)
    number = re.fullmatch(r"[0-9][0-9_.:eExXoabcdfA-F+-]*", text)
    return None if not plain or number or text.lower() in NOT_STRINGS else text
