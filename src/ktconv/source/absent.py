"""Files of a checkpoint that are not there: never downloaded, or links that lead to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktconv.source.hub_cache import download_command
from ktconv.system.regular_files import broken_link, link_hint
from ktconv.system.text import first_few


def absence(directory: Path, names: Sequence[str], hint: str) -> tuple[str, str]:
    """Reason why files `names` of `directory`, of which none is there, are missing, as the end of a
    sentence; and the way out, which is `hint` where nothing better is known."""
    words = f"are missing: {first_few(names)}"
    links = [path for name in names if broken_link(path := directory / name)]
    if links:
        kind = "are broken links" if len(links) == len(names) else "are missing, or broken links"
        words = f"{kind}: {first_few(names)}; {links[0].name} leads to {links[0].readlink()}"
        hint = link_hint(links[0])
    command = download_command(directory, names)
    return words, f"Download what is missing: {command}" if command else hint
