"""Temporary directories: those of dead processes go, those of others stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ktconv.source.remote import scratch

pytestmark = [pytest.mark.slow, pytest.mark.network]

MAKE = "from ktconv.source.remote import scratch; print(scratch.make(), flush=True); input()"


def test_what_killed_processes_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "other-machine"
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    (theirs / "model").mkdir()
    for name in ("no-lock", "foreign"):
        (tmp_path / f"{scratch.PREFIX}{name}").mkdir()
    (tmp_path / f"{scratch.PREFIX}foreign" / ".lock").write_text("a machine of another name")
    other.mkdir()
    (other / ".lock").touch()
    (tmp_path / f"{scratch.PREFIX}link").symlink_to(other)
    before = set(tmp_path.iterdir())
    scratch.remove_stale()
    assert set(tmp_path.iterdir()) == before and (theirs / "model").is_dir()
    process.kill()
    process.communicate()
    mine = scratch.make()
    scratch.remove_stale()
    assert set(tmp_path.iterdir()) == {*before - {theirs}, mine}
    scratch.remove(mine)
    assert not mine.exists()
