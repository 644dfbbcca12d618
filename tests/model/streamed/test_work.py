"""Folders of passes: found again, locked, removed, and nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import no_space
from helpers.paths import EXAMPLE

pytest.importorskip("torch")

from ktconv.errors import DiskFullError, InUseError, KtconvError, OutputError, UsageError
from ktconv.model.streamed.states import STATE_FILE
from ktconv.model.streamed.work import (
    STALE_SECONDS,
    WorkFolder,
    default_root,
    pass_folder,
    pass_identity,
)
from ktconv.source import open_checkpoint
from ktconv.writer.journal import OutputLock

pytestmark = [pytest.mark.slow, pytest.mark.torch]

ONE, OTHER = {"kind": "one"}, {"kind": "other"}


def committed(identity: dict[str, Any], root: Path) -> Path:
    """The folder that a killed pass leaves."""
    with WorkFolder(identity, root) as work:
        (work.path / STATE_FILE).write_text("{}")
        return work.path


def test_a_pass_finds_its_folder_again(tmp_path: Path) -> None:
    folder = committed(ONE, tmp_path)
    assert committed(OTHER, tmp_path) != folder
    with WorkFolder({"kind": "one"}, tmp_path) as work:
        assert (
            work.path == folder == pass_folder(ONE, tmp_path) and (work.path / STATE_FILE).exists()
        )
        work.complete()
        assert not folder.exists()
    assert not folder.exists()


def test_a_folder_without_a_state_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyError), WorkFolder(ONE, tmp_path) as work:
        (work.path / "states-a.bin").write_bytes(bytes(100))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_nfs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a file that is open when it is removed stays under another name until it is closed."""
    kept: list[Path] = []
    unlink, release = os.unlink, OutputLock.release

    def unlinked(name: str, *, dir_fd: int) -> None:
        if name == "lock":
            place = Path(f"/proc/self/fd/{dir_fd}").readlink()
            kept.append((place / name).rename(place / ".nfs0001"))
        else:
            unlink(name, dir_fd=dir_fd)

    def released(lock: OutputLock) -> None:
        release(lock)
        unlink(kept[0])

    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(OutputLock, "release", released)
    work = WorkFolder({"a": 1}, tmp_path)
    work.complete()
    monkeypatch.undo()
    assert kept and list(tmp_path.iterdir()) == []


def test_a_failed_pass_is_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), WorkFolder(ONE, tmp_path) as work:
        (work.path / STATE_FILE).write_text("{}")
        raise KeyboardInterrupt
    assert (work.path / STATE_FILE).exists()


def test_two_runs_of_a_pass_at_once(tmp_path: Path) -> None:
    """Within a process, and between two; another pass is not in the way."""
    code = f"""
from pathlib import Path
from ktconv.errors import InUseError
from ktconv.model.streamed.work import WorkFolder
try:
    WorkFolder({{"kind": "one"}}, Path({str(tmp_path)!r}))
except InUseError as error:
    print(error)
"""
    with WorkFolder(ONE, tmp_path) as work:
        with pytest.raises(InUseError, match=f"same pass in {work.path}"):
            WorkFolder(ONE, tmp_path)
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
        assert str(work.path) in done.stdout.decode()
        with WorkFolder(OTHER, tmp_path):
            pass
        assert work.path.exists()
    with WorkFolder(ONE, tmp_path):
        pass


def age(folder: Path, seconds: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def test_stale_passes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = [committed({"kind": number}, tmp_path) for number in range(3)]
    age(kept[0], STALE_SECONDS - 3600)
    for name in ("0" * 32, "notes"):  # not ours: without the mark, or by another name
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
        kept.append(tmp_path / name)
        age(tmp_path / name, 2 * STALE_SECONDS)
    (tmp_path / "notes" / ".ktconv").mkdir()
    (tmp_path / "notes" / ".ktconv" / "run.json").write_text('{"pass": 1}')
    (tmp_path / ("1" * 32)).symlink_to(kept[2])
    (tmp_path / ("2" * 32)).write_text("a file")
    stale = committed(OTHER, tmp_path)
    (stale / "link").symlink_to(kept[1])
    age(stale, STALE_SECONDS + 3600)
    said: list[str] = []
    WorkFolder(ONE, tmp_path, said.append).close()
    assert not stale.exists() and len(said) == 1 and str(stale) in said[0]
    assert all(path.exists() for path in kept) and (kept[1] / STATE_FILE).exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        *(path.name for path in kept), "1" * 32, "2" * 32
    }  # fmt: skip


def test_a_stale_pass_that_runs_is_kept(tmp_path: Path) -> None:
    with WorkFolder(OTHER, tmp_path) as work:
        age(work.path, 2 * STALE_SECONDS)
        WorkFolder(ONE, tmp_path).close()
        assert work.path.exists()


def test_a_pass_that_goes_on_is_not_stale(tmp_path: Path) -> None:
    folder = committed(ONE, tmp_path)
    age(folder, 2 * STALE_SECONDS)
    said: list[str] = []
    WorkFolder(ONE, tmp_path, said.append).close()
    WorkFolder(OTHER, tmp_path, said.append).close()
    assert folder.exists() and said == []


@pytest.mark.parametrize("inner", ["", ".ktconv"])
def test_links_are_refused(tmp_path: Path, inner: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    folder = committed(ONE, root)
    linked = folder / inner
    linked.rename(tmp_path / "moved")
    linked.symlink_to(outside)
    with pytest.raises(OutputError, match="is a link"):
        WorkFolder(ONE, root)
    assert list(outside.iterdir()) == []


def test_places_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OutputError, match="is a file"):
        WorkFolder(ONE, file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(KtconvError) as raised:
        WorkFolder(ONE)
    assert raised.value.hint == "use --work-dir DIR"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(DiskFullError):
        patch.setattr(os, "fsync", no_space)
        patch.setattr("ktconv.system.files.sync", lambda _: None)
        WorkFolder(ONE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    WorkFolder(ONE, tmp_path).close()


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "ktconv" / "passes"
    with WorkFolder(ONE) as work:
        assert work.path.parent == default_root()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_root() == tmp_path / "home" / ".cache" / "ktconv" / "passes"

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UsageError, match="no home directory"):
        default_root()


def test_the_identity_has_all_that_results_depend_on(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(EXAMPLE)
    ids = [b"\1\0", b"\2"]
    identity = pass_identity("verify", checkpoint, ids, dtype="bfloat16")
    assert json.loads(json.dumps(identity)) == identity
    assert identity == pass_identity("verify", open_checkpoint(EXAMPLE), ids, dtype="bfloat16")
    for other in (
        pass_identity("stats", checkpoint, ids, dtype="bfloat16"),
        pass_identity("verify", checkpoint, [b"\1", b"\0\2"], dtype="bfloat16"),
        pass_identity("verify", checkpoint, ids[:1], dtype="bfloat16"),
        pass_identity("verify", checkpoint, ids, dtype="float32"),
    ):
        assert other != identity
