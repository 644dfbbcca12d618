"""Files that change hands while they are opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ktconv.system.regular_files import MissingFileError, read_small
from ktconv.writer.journal import Journal


def test_a_file_that_is_removed_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As run.json is, by the run that finishes an output: it counts as missing."""
    journal = Journal(tmp_path)
    journal.directory.mkdir()
    journal.run_file.write_text("{}")
    opened, real = [], os.open

    def removing(path: Any, *more: Any, **named: Any) -> int:
        descriptor = real(path, *more, **named)
        if Path(path) == journal.run_file:
            journal.run_file.unlink()
            opened.append(path)
        return descriptor

    monkeypatch.setattr(os, "open", removing)
    with pytest.raises(MissingFileError, match="was removed while it was opened"):
        read_small(journal.directory, journal.run_file.name)
    journal.run_file.write_text("{}")
    assert journal.read_run() is None and len(opened) == 2
