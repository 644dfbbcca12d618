"""Large pieces that begin to go to the disk as they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktconv.system.files import BEHIND_BYTES, write_behind


@pytest.mark.parametrize("refuses", [False, True])
def test_only_large_pieces_and_a_refusal_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    asked = []
    advise = os.posix_fadvise

    def recording(fd: int, offset: int, length: int, advice: int) -> None:
        asked.append((offset, length))
        if refuses:
            raise OSError(22, "Invalid argument")
        advise(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", recording)
    pieces = [b"a" * 100, b"b" * BEHIND_BYTES, b"c" * (BEHIND_BYTES - 1)]
    with (tmp_path / "file").open("wb") as file:
        offset = 0
        for piece in pieces:
            write_behind(file.fileno(), memoryview(piece), offset)
            offset += len(piece)
    assert asked == [(100, BEHIND_BYTES)]
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
