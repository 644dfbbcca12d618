"""Files next to the weights: configuration, tokenizer, chat templates, code, licences.

They are copied unchanged, and the manifest records their checksums. They are recognized by name,
in sources and in outputs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.source.adapter.beside import is_adapter_file
from ktconv.system.pointers import refuse_pointer_at
from ktconv.system.regular_files import (
    MissingFileError,
    check_small,
    opened_small,
    read_chunks,
    unreadable,
)
from ktconv.system.text import path_of, path_text

RECORDS = "side_files"  # of the manifest: name by text.path_text -> {"bytes", "sha256"}
Record = dict[str, Any]

_PATTERNS = ("*.json", "*.jinja", "vocab*.txt", "merges*.txt", "*.model", "*.tiktoken", "*.py")
_LEGAL_PATTERNS = (
    *("LICENSE*", "License*", "LICENCE*", "COPYING*", "NOTICE*", "Notice*"),
    *("USE_POLICY*", "USAGE_POLICY*", "THIRD_PARTY_NOTICES*"),
)
_TEMPLATES = "additional_chat_templates"
# What ktconv writes beside shards.
MANIFEST, CARD, INDEX = "ktconv.json", "README.md", "model.safetensors.index.json"


def is_legal(name: Path) -> bool:
    """Whether it is a licence, notice or policy of use, which no loader reads."""
    return _fits(name.name, _LEGAL_PATTERNS) and not _fits(name.name, _PATTERNS)


def list_side_files(directory: Path) -> list[Path]:
    """Names of all side files, relative to `directory`, readable or not."""
    names = [name for name in _names(directory) if _is_side_file(directory, name)]
    found = [Path(name) for name in names if not _is_own(name)]
    if (directory / _TEMPLATES).is_dir():
        templates = _names(directory / _TEMPLATES)
        found += [Path(_TEMPLATES, name) for name in templates if _fits(name, ("*.jinja",))]
    elif os.path.lexists(directory / _TEMPLATES):
        found.append(Path(_TEMPLATES))
    return sorted(found)


def find_side_files(directory: Path) -> list[Path]:
    """Side files of a model, which can be read: `list_side_files` without those of an adapter.

    CheckpointError names one that is missing behind its link, leads out of `directory`, is no
    regular file or a pointer of Git LFS, ResourceError one that the system does not let us read.
    """
    names = [name for name in list_side_files(directory) if not is_adapter_file(name.name)]
    refuse_pointer_at(directory / CARD)  # the new card takes over what it says
    for name in names:
        _check_name(directory, name)
        if name == Path(_TEMPLATES):
            _names(directory / name)  # raises: it is none
        check_small(directory, name)
    return names


# ---- what the manifest records -----------------------------------------------------------


class Fingerprint:
    """Size and SHA-256 of the chunks that pass through `of`."""

    def __init__(self) -> None:
        self._digest, self._nbytes = hashlib.sha256(), 0

    def of(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Chunks, each after it was added."""
        for chunk in chunks:
            self._digest.update(chunk)
            self._nbytes += len(chunk)
            yield chunk

    def record(self) -> Record:
        return {"bytes": self._nbytes, "sha256": self._digest.hexdigest()}


def record_of(directory: Path, name: str | Path) -> Record:
    """Record of a file for the manifest. Raises as `regular_files.opened_small`."""
    found = Fingerprint()
    with opened_small(directory, name) as descriptor:
        for _ in found.of(read_chunks(directory / name, descriptor)):
            pass
    return found.record()


def recorded(manifest: Mapping[str, Any]) -> dict[str, Record] | None:
    """Records in a manifest; None for those of earlier versions, which record nothing.

    Raises CheckpointError for anything of another form.
    """
    records = manifest.get(RECORDS)
    if records is None:
        return None
    if not isinstance(records, dict) or not all(map(_is_record, records, records.values())):
        raise CheckpointError(f"the {RECORDS} of ktconv.json are damaged", "Restore the manifest.")
    return records


def _is_record(name: str, about: object) -> bool:
    inside = not name.startswith("/") and ".." not in name.split("/")
    return inside and isinstance(about, dict) and {"bytes", "sha256"} <= about.keys()


class Flaw(Struct, frozen=True):
    """A side file of an output that is not as the manifest records it."""

    check: str  # missing file, changed file, damaged file or unexpected file
    name: str
    message: str  # a sentence without its full stop


def flaws(directory: Path, records: Mapping[str, Record]) -> Iterator[Flaw]:
    """All flaws of an output. ResourceError if the system refuses to read a file."""
    for name, record in records.items():
        try:
            found = record_of(directory, path_of(name))
        except MissingFileError:
            yield Flaw("missing file", name, f"{directory} has no {name}")
        except CheckpointError as error:
            yield Flaw("damaged file", name, str(error))
        else:
            if found != {key: record[key] for key in found}:
                yield Flaw("changed file", name, f"{name} differs from the file that was written")
    for path in list_side_files(directory):
        if path_text(path) not in records and not is_legal(path):
            yield Flaw(
                "unexpected file",
                path_text(path),
                f"{path} was not written by this conversion, and loaders may read it",
            )


# ---- names -------------------------------------------------------------------------------


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except NotADirectoryError:
        raise CheckpointError(f"{directory} is not a directory", "Remove or rename it.") from None
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is a broken link", "Download it again, or copy it there."
        ) from None
    except OSError as error:
        raise unreadable(directory, error) from error


def _check_name(directory: Path, name: Path) -> None:
    """The manifest is UTF-8."""
    try:
        os.fsencode(name).decode()  # its bytes, whatever the locale makes of them
    except UnicodeDecodeError:
        raise CheckpointError(
            f"{directory} contains {str(name)!r}, a name that is not UTF-8", "Rename or remove it."
        ) from None


def _is_side_file(directory: Path, name: str) -> bool:
    """Directories do not count, even with such a name: LICENSES."""
    legal = _fits(name, _LEGAL_PATTERNS) and not (directory / name).is_dir()
    return legal or _fits(name, _PATTERNS)


def _is_own(name: str) -> bool:
    """Whether every conversion writes a new one."""
    return name in (MANIFEST, CARD) or name.endswith(".index.json")


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
