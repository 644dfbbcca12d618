"""A small share of `make torture`, the same each time; and that it finds what it is for."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from torture.bench import Bench, opened_bench
from torture.faults import failed_fsyncs, full_disk, losses_after_kills, power_losses, short_writes
from torture.machines import network_locks
from torture.parts import Amount
from torture.power import MODES, Call, Disk, File, read_log
from torture.shim import Told, Wrong, compiled, why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"the shim {why_not()}"),
    pytest.mark.slow,
    pytest.mark.process,
]
NAME = "int4"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    room = tmp_path_factory.mktemp("torture")
    kept = tmp_path_factory.mktemp("kept")
    with opened_bench(room, kept, seed=1, modules=("ktconv.quantize.packed.run",)) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_failures(bench: Bench) -> Iterator[None]:
    yield
    failures, bench.failures = bench.failures, []
    assert not failures, failures[0]


def test_a_disk_that_is_full_from_a_call_on(bench: Bench) -> None:
    counts = full_disk(bench, NAME, every=40)
    assert counts["refused"] == counts["full disk"] >= 2  # newer Pythons make fewer calls


def test_writes_of_half_the_bytes(bench: Bench) -> None:
    assert short_writes(bench, NAME)["short writes"] > 100


def test_the_first_fsync_fails(bench: Bench) -> None:
    """It is that of OUTPUT's name."""
    assert failed_fsyncs(bench, NAME, every=1000) == {"fsync fails": 1, "refused": 1}


def test_power_losses(bench: Bench) -> None:
    assert power_losses(bench, NAME, 1)["power losses"] >= 1
    assert losses_after_kills(bench, NAME, every=100)["power losses"] == 2


def test_locks_of_network_file_systems(bench: Bench) -> None:
    network_locks(bench, NAME, errors=[errno.ENOLCK])


# ---- the tools themselves ----


def test_a_failure_is_kept_as_evidence(bench: Bench) -> None:
    with bench.trial(NAME) as trial:
        bench.run(trial, Wrong("kill", 40))
        raise AssertionError("nothing is right")
    (failure,), bench.failures = bench.failures, []
    assert "SIGKILL at call 40" in failure and "nothing is right" in failure
    (evidence,) = bench.kept.glob("*/evidence.json")
    assert (evidence.parent / "output").is_dir() and "quantize-cpu" in evidence.read_text()


PROGRAM = """
import os
os.mkdir("{root}/folder")
with open("{root}/folder/a.part", "wb") as file:
    file.write(b"x" * 5000)
    file.flush()
    {sync}
os.rename("{root}/folder/a.part", "{root}/a")
{named}
"""
OF_FILE, OF_NAME = "os.fsync(file.fileno())", "os.fsync(os.open('{root}', 0))"


def states(tmp_path: Path, sync: str, named: str) -> set[str | None]:
    """What can be left of a file that is written, synced, renamed and its name made durable, where
    one of these steps is left out: nothing, all of it or something else."""
    import subprocess
    import sys

    root = tmp_path / "root"
    root.mkdir()
    told = Told(root, tmp_path / "state", tmp_path / "log")
    library, disk = compiled(tmp_path), Disk(root)
    code = PROGRAM.format(root=root, sync=sync, named=named.format(root=root))
    preload = {"LD_PRELOAD": str(library), **told.variables(Wrong())}
    subprocess.run([sys.executable, "-c", code], env=os.environ | preload, check=True)
    assert told.counted()[0] >= 4
    for call in read_log(tmp_path / "log"):
        disk.apply(call)
    found: set[str | None] = set()
    for number in range(40):
        target = tmp_path / str(number)
        target.mkdir()
        disk.restore(target, MODES[number % len(MODES)], random.Random(number))
        path = target / "a"
        found.add(_kind(path.read_bytes()) if path.exists() else None)
    return found


def _kind(content: bytes) -> str:
    return "whole" if content == b"x" * 5000 else "broken"


def test_what_a_power_loss_leaves(tmp_path: Path) -> None:
    for name, sync, named, wanted in (
        ("all steps", OF_FILE, OF_NAME, {"whole"}),
        ("no fsync of the file", "pass", OF_NAME, {"whole", "broken"}),
        ("no fsync of the name", OF_FILE, "", {"whole", None}),
    ):
        place = tmp_path / name.replace(" ", "-")
        place.mkdir()
        assert states(place, sync, named) == wanted, name


def test_an_fsync_after_one_that_failed_saves_nothing() -> None:
    file = File()
    file.write(0, b"old")
    file.sync()
    file.write(0, b"new")
    file.sync_failed()
    file.sync()
    assert bytes(file.now) == b"new" and file.durable == b"old"
    file.write(0, b"new")
    file.sync()
    assert file.durable == b"new"


def test_shared_mappings_are_noticed(tmp_path: Path) -> None:
    """Nobody sees what is written to them."""
    path = tmp_path / "a"
    path.write_bytes(b"x")
    disk = Disk(tmp_path)
    with pytest.raises(AssertionError, match="the log cannot have M"):
        disk.apply(Call("M", path.stat().st_ino, 0, 0, str(path), "", b""))


def test_faults_have_names() -> None:
    wrong = Wrong("fail", 3, "write", errno.ENOSPC, sticky=True)
    assert str(wrong) == "ENOSPC at call 3 and later of write"


def test_amounts() -> None:
    tenth, more = Amount(1, 0.1), Amount(1, 8)
    assert (tenth.every(8), tenth.times(12), tenth.times(2)) == (80, 1, 1)
    assert (more.every(8), more.every(1), more.times(12)) == (1, 1, 96)
