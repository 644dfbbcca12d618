"""Paths in the local cache of the hub: the repository and commit that a file is of, and the
way to files that are not there: never downloaded, or links that lead to nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ktconv.system.regular_files import broken_link, link_hint
from ktconv.system.text import first_few

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_CACHED = re.compile(r"models--(.+?)--(.+)")
_MOST_NAMES = 8  # in a command; with more, a whole repository is named


class CachedPlace(NamedTuple):
    """A path in the cache."""

    id: str  # org/name
    commit: str | None
    inside: tuple[str, ...]  # the path below the commit


def cached_place(path: Path) -> CachedPlace | None:
    """Place in the cache that a path is; None: it is not there."""
    for number, part in reversed(list(enumerate(path.parts))):
        match = _CACHED.fullmatch(part)
        if match is not None and HUB_ID.fullmatch(f"{match[1]}/{match[2]}"):
            rest = path.parts[number + 1 :]
            commit = rest[1] if rest[:1] == ("snapshots",) and len(rest) > 1 else None
            return CachedPlace(f"{match[1]}/{match[2]}", commit, rest[2:])
    return None


def download_command(
    repository: str,
    revision: str | None,
    *,
    files: Sequence[str] = (),
    patterns: Sequence[str] = (),
) -> str:
    """Command that brings a repository of the hub, or files of it, into the local cache."""
    words = ["hf", "download", repository, *files]
    words += ["--revision", revision] if revision else []
    words += ["--include", *patterns] if patterns else []
    return shlex.join(words)


def absence(directory: Path, names: Sequence[str], hint: str) -> tuple[str, str]:
    """Reason why files `names` of `directory`, of which none is there, are missing, as the end of a
    sentence; and the way out, which is `hint` where nothing better is known."""
    words = f"are missing: {first_few(names)}"
    links = [path for name in names if broken_link(path := directory / name)]
    if links:
        kind = "are broken links" if len(links) == len(names) else "are missing, or broken links"
        words = f"{kind}: {first_few(names)}; {links[0].name} leads to {links[0].readlink()}"
        hint = link_hint(links[0])
    place = cached_place(directory)
    if place is not None and place.commit is not None:
        missing = ["/".join((*place.inside, name)) for name in names]
        wanted = missing if len(missing) <= _MOST_NAMES else []
        command = download_command(place.id, place.commit, files=wanted)
        hint = f"Download what is missing: {command}"
    return words, hint
