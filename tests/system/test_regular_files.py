"""Files that change hands while they are opened, and files of options."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ktconv.errors import ResourceError, UsageError
from ktconv.system.regular_files import MissingFileError, read_given, read_small
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


# ---- files of options --------------------------------------------------------------------


def test_files_and_pipes_of_options_are_read(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"12345678")
    assert read_given(file, "--experts", "write it so", limit=8) == b"12345678"
    os.mkfifo(pipe)  # as <(command) is
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"of a command"))
    writer.start()
    assert read_given(pipe, "--experts", "write it so") == b"of a command"
    writer.join()


def test_large_files_of_options_are_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 50)
    with pytest.raises(UsageError, match=r"--experts .*large is larger than 67\.1 MB") as caught:
        read_given(path, "--experts", "write it so")
    assert caught.value.hint == "write it so"


@pytest.mark.parametrize(
    ("name", "words"),
    [("none", "does not exist"), ("file/none", "does not exist"), ("/dev/zero", "is a device")],
)
def test_files_of_options_that_are_none(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"^--load .*{words}$"):
        read_given(tmp_path / name, "--load", "give counts")
    with pytest.raises(UsageError, match=r"is a directory$"):
        read_given(tmp_path, "--load", "give counts")


def test_a_file_of_an_option_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "file"
    path.write_text("x" * 2000)
    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(ResourceError, match="file cannot be read: Permission denied"):
        read_given(path, "--load", "give counts")
