"""Adapters as manifests name them, NAME:WEIGHT without directories, and where they are found.

A manifest is published with its output, so it does not say where on a disk an adapter lay.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError, UsageError
from ktconv.source.adapter.beside import CONFIG
from ktconv.source.adapter.choices import Choice
from ktconv.system.regular_files import MAX_CONFIG_BYTES, read_small

Record = Mapping[str, Any]
ENCODED_AGAIN = "encoded_again"  # of manifests: `Checkpoint.encoded_again`


def files_of(number: int, weight: float) -> str:
    """The start of names that the files of an adapter have among those of a source; adapters are
    numbered from 1 on."""
    return f"adapter {number} x {weight!r}/"


def chosen(texts: Iterable[str]) -> list[Choice]:
    """Adapters of a checkpoint or a manifest, all of which have a weight. CheckpointError for a
    weight that is none."""
    found = []
    for text in texts:
        head, _, weight = text.rpartition(":")
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not head or not math.isfinite(number):
            raise CheckpointError(
                f"the manifest names the adapter {text!r:.80}, which has no weight",
                "restore ktconv.json, or convert again",
            )
        found.append(Choice(Path(head), number))
    return found


def names_of(texts: Iterable[str]) -> list[str]:
    """NAME:WEIGHT of DIR:WEIGHT, for manifests."""
    return [f"{name_of(one.directory)}:{one.weight!r}" for one in chosen(texts)]


def name_of(directory: Path) -> str:
    """The name of an adapter's directory, without where it lies."""
    name = directory.name
    return directory.resolve().name or "adapter" if name in ("", "..") else name


def located(
    recorded: Sequence[str], files: Mapping[str, Record], output: Path, model: str | Path
) -> tuple[str, ...]:
    """Adapters that the manifest of `output` names, as DIR:WEIGHT: directories of their names next
    to or in the output, the model and the current directory, whose files have the recorded sizes
    and config. `files`: of the source, from the manifest. UsageError where one is not found."""
    choices = [one._replace(directory=Path(one.directory.name)) for one in chosen(recorded)]
    found: list[Path] = []
    for number, one in enumerate(choices, start=1):
        start = files_of(number, one.weight)
        own = {name.removeprefix(start): file for name, file in files.items()
               if name.startswith(start)}  # fmt: skip
        near = (place / one.directory for place in _places(output, model))
        there = (place for place in near if place not in found and _is_it(place, own))
        if (place := next(there, None)) is None:
            raise UsageError(
                f"{output} was converted with the adapter {one.directory}, which is neither next "
                "to it nor to the model",
                "say where it is: "
                + " ".join(
                    f"--adapter {shlex.quote(str(at._replace(directory='DIR' / at.directory)))}"
                    for at in choices
                ),
            )
        found.append(place)
    return tuple(f"{at}:{one.weight!r}" for at, one in zip(found, choices, strict=True))


def _places(output: Path, model: str | Path) -> Iterator[Path]:
    for one in (output, Path(model)):
        if one.exists():  # and is no name of a hub or URL
            whole = one.absolute()
            yield from (whole.parent, whole)
    yield Path.cwd()


def _is_it(directory: Path, files: Mapping[str, Record]) -> bool:
    """Whether a directory has these files; of the weights, which may be large, the size counts."""
    try:
        for name, file in files.items():
            if (directory / name).stat().st_size != file.get("bytes"):
                return False
            if name == CONFIG:
                data = read_small(directory, name, MAX_CONFIG_BYTES)
                if hashlib.sha256(data).hexdigest() != file.get("sha256"):
                    return False
    except (OSError, CheckpointError):
        return False
    return directory.is_dir()
