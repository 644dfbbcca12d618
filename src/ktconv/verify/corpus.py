"""The text for levels layers and model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ktconv.errors import UsageError


def read_text(path: Path | None) -> tuple[str, str]:
    """The text of a file, or the built-in one, and its name in the report.

    Raises UsageError for a file that cannot be read or is empty.
    """
    if path is None:
        shipped = resources.files("ktconv.model").joinpath("sample.txt")
        return shipped.read_text(encoding="utf-8"), "the built-in sample"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--text {path} cannot be read: it is not UTF-8 text at byte {error.start}"
        ) from error
    if not text.strip():
        raise UsageError(f"--text {path} is empty", "give a text file of a few pages")
    return text, path.name
