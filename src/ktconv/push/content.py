"""What of a finished output is sent: everything in it that is neither hidden nor half-written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ktconv.errors import OutputError
from ktconv.system.files import io_error
from ktconv.system.pointers import refuse_pointer_at
from ktconv.writer.journal import STATE_DIRECTORY, file_is_intact
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest

PART = ".part"
# The same rule for the hub's library: ".*" are names at the top, "*/.*" those below.
IGNORED = (".*", "*/.*", f"*{PART}")
# Engines read every such file, whether a conversion wrote it or not.
_WEIGHTS = (".safetensors", ".kt", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Content:
    """The files of an output, relative to it, with their sizes in bytes."""

    output: Path
    files: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def content_of(output: Path) -> Content:
    """What would be sent. OutputError for an output that is incomplete, damaged or none, and for
    links and weights that no conversion wrote."""
    manifest = _manifest(output)
    weights = {str(file["name"]): file for file in manifest.files}
    found = dict(sorted(_files(output, set(weights))))
    for name in found:
        refuse_pointer_at(output / name)
    for name, record in weights.items():
        if not file_is_intact(output, record):
            what = "is not as it was written" if name in found else "is missing"
            raise OutputError(
                f"{output / name} {what}",
                "run the conversion again, which writes it anew; `ktconv verify` finds all flaws",
            )
    recorded = {*manifest.names("files"), *(manifest.side_files or {})}
    tops = {*found, *(name.split("/")[0] for name in found)}
    for name in sorted(recorded - tops):
        raise OutputError(f"{output / name} is missing", "run the conversion again")
    for name in found:
        if name.endswith(_WEIGHTS) and name not in weights:
            raise OutputError(
                f"{output} contains {name}, weights that its {MANIFEST} does not name",
                "remove the file: engines would read it",
            )
    return Content(output, found)


def _manifest(output: Path) -> Manifest:
    if not output.is_dir():
        what = "is a file" if output.exists() else "does not exist"
        raise OutputError(
            f"{output} {what}, not an output of ktconv", "give the directory of a conversion"
        )
    if os.path.lexists(output / STATE_DIRECTORY):
        raise OutputError(
            f"the conversion in {output} is not finished",
            "run the same conversion again, which continues it, then push",
        )
    manifest = read_manifest(output)
    if manifest is None and (output / MANIFEST).exists():
        raise OutputError(f"{output / MANIFEST} is damaged", "restore it, or convert again")
    if manifest is None:
        raise OutputError(
            f"{output} has no {MANIFEST}, so it is not a finished output of ktconv",
            "give the directory of a conversion; other checkpoints: hf upload",
        )
    if damaged := manifest.damaged_units:
        raise OutputError(
            f"{output / MANIFEST} is damaged: its record of {damaged[0]}",
            "restore it, or convert again",
        )
    return manifest


def _files(output: Path, weights: set[str]) -> Iterator[tuple[str, int]]:
    """Names and sizes. Weights may be links to another disk; another link could lead to
    any file of this machine."""

    def refuse(error: OSError) -> None:
        raise io_error("read", Path(error.filename or output), error) from error

    for place, folders, names in os.walk(output, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        shown = sorted(name for name in names if not _is_left_out(name))
        for name in [*folders, *shown]:
            path = Path(place, name)
            inside = path.relative_to(output).as_posix()
            if path.is_symlink() and inside not in weights:
                raise OutputError(
                    f"{path} is a link, and what it leads to would be published",
                    "replace it by a copy, or remove it",
                )
        for name in shown:
            path = Path(place, name)
            if not path.is_file():
                raise OutputError(f"{path} is not a regular file", "remove it")
            yield path.relative_to(output).as_posix(), path.stat().st_size


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name.endswith(PART)
