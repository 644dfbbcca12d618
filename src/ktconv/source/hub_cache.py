"""Paths in the local cache of the hub: the repository and commit that a file is of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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


def download_command(directory: Path, missing: Sequence[str]) -> str | None:
    """Command that brings missing files of a cached model; None where the directory is not in the
    cache."""
    place = cached_place(directory)
    if place is None or place.commit is None:
        return None
    names = ["/".join((*place.inside, name)) for name in missing]
    listed = names if len(names) <= _MOST_NAMES else []
    return shlex.join(["hf", "download", place.id, *listed, "--revision", place.commit])
