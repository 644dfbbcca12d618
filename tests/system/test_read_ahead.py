"""Spans that the system reads ahead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktconv.system.files import AHEAD_BYTES
from ktconv.system.opened import advise
from ktconv.system.stores import Span


def test_neighbours_are_asked_for_in_pieces_that_linux_reads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one request for megabytes it would read only the beginning."""
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *span: asked.append(span))
    file = tmp_path / "file"
    file.write_bytes(b"")
    advise([Span(file, 10, AHEAD_BYTES), Span(file, 10 + AHEAD_BYTES, 5), Span(file, 1, 2)])
    wanted = [(10, AHEAD_BYTES), (10 + AHEAD_BYTES, 5), (1, 2)]
    assert asked == [(*span, os.POSIX_FADV_WILLNEED) for span in wanted]
