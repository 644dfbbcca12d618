"""The text that levels layers and model read."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ktconv.errors import UsageError


def read_text(path: Path | None) -> tuple[str, str]:
    """The text, and how to call it; the one that ships where no file is given.

    Raises UsageError for a file that cannot be read, or that holds no text.
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
