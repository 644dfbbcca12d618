"""Files of a checkpoint that are not there: never downloaded, or links that lead to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktconv.checkpoint.hub_cache import download_command
from ktconv.checkpoint.index import listed
from ktconv.errors import CheckpointError
from ktconv.system.regular_files import broken_link, link_hint


def absent(
    directory: Path, names: Sequence[str], whole: str, hint: str, there: str = ""
) -> CheckpointError:
    """The error for files `names` of `directory`, of which none is there. `whole` says what they
    are some of: "5 shards in DIR"; `there` what of them is in other files, to end a sentence."""
    links = [path for name in names if broken_link(path := directory / name)]
    if links:
        kind = "are broken links" if len(links) == len(names) else "are missing, or broken links"
        words = f"{kind}: {listed(names)}; {links[0].name} leads to {links[0].readlink()}"
        hint = link_hint(links[0])
    else:
        words = f"are missing: {listed(names)}"
    command = download_command(directory, names)
    return CheckpointError(
        f"{len(names)} of the {whole} {words}{there}",
        f"Download what is missing: {command}" if command else hint,
    )
