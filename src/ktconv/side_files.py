"""Files beside the weights: configuration, tokenizer, chat templates, code, licences.

They are copied as they are. Which files count as such follows from their names, for a source and
for an output alike.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

from ktconv.errors import CheckpointError
from ktconv.regular_files import opened_small, unreadable

_PATTERNS = ("*.json", "*.jinja", "vocab*.txt", "merges*.txt", "*.model", "*.tiktoken", "*.py")
_LEGAL_PATTERNS = ("LICENSE*", "NOTICE*")
_TEMPLATES = "additional_chat_templates"
_OWN_FILES = ("ktconv.json", "README.md", "model.safetensors.index.json")


def is_legal(name: Path) -> bool:
    """Whether it is a licence or notice, which no loader reads."""
    return _fits(name.name, _LEGAL_PATTERNS) and not _fits(name.name, _PATTERNS)


def list_side_files(directory: Path) -> list[Path]:
    """Names of all side files, relative to `directory`, whatever lies under them."""
    names = [name for name in _names(directory) if _is_side_file(directory, name)]
    found = [Path(name) for name in names if not _is_own(name)]
    if os.path.lexists(directory / _TEMPLATES):
        templates = _names(directory / _TEMPLATES)
        found += [Path(_TEMPLATES, name) for name in templates if _fits(name, ("*.jinja",))]
    return sorted(found)


def find_side_files(directory: Path) -> list[Path]:
    """`list_side_files`, where each can be read.

    CheckpointError names one that is missing behind its link, leads out of `directory` or is no
    regular file, ResourceError one that the system does not let us read.
    """
    names = list_side_files(directory)
    for name in names:
        _check_name(directory, name)
        with opened_small(directory, name):
            pass
    return names


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
        str(name).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{directory} holds {str(name)!r}, a name that is not UTF-8", "Rename or remove it."
        ) from None


def _is_side_file(directory: Path, name: str) -> bool:
    """A directory is none if it may be called so: LICENSES."""
    legal = _fits(name, _LEGAL_PATTERNS) and not (directory / name).is_dir()
    return legal or _fits(name, _PATTERNS)


def _is_own(name: str) -> bool:
    """What every conversion writes anew."""
    return name in _OWN_FILES or name.endswith(".index.json")


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
