"""Faults at every place that writes, syncs or renames; and the order that survives power loss."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import STATE, check_reader, contents, done, refused, run, staged, write_model
from helpers.disk_calls import CALLS, Site, Sites, call_site, hooked

pytestmark = pytest.mark.slow

LAYOUTS = {
    "shards": (),
    "several shards per layer": ("--max-shard-size=30kB",),
    "layer folders": ("--layout=layers",),
}

CleanRuns = Callable[[str], tuple[dict[str, str], Counter[Site]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=2, experts=2)


@pytest.fixture(scope="module")
def clean_runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanRuns:
    """By layout: what a clean run writes, and how often it calls from which site."""

    @cache
    def run_once(layout: str) -> tuple[dict[str, str], Counter[Site]]:
        output, sites = tmp_path_factory.mktemp("clean") / "output", Sites()
        with hooked(sites):
            done(model, output, *LAYOUTS[layout])
        return contents(output), Counter(sites.found)

    return run_once


class Recorder:
    """What happened, one line per call, with descriptors as paths."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        target = arguments[-1] if name in ("replace", "rename") else arguments[0]
        path = str(
            Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
        )
        with self._lock:
            self.events.append((name, path))

    def position(self, name: str, path: Path, after: int = -1) -> int:
        """Of the first such event behind position `after`."""
        return self.events.index((name, str(path)), after + 1)


def test_order_of_fsync_rename_and_journal(model: Path, tmp_path: Path) -> None:
    output, recorder = tmp_path / "output", Recorder()
    with hooked(recorder):
        done(model, output, "--max-shard-size=30kB")
    state = output / STATE
    units = [path for name, path in recorder.events if name == "replace" and STATE in path]
    shards = [path.name for path in output.glob("*.safetensors")]
    assert len(shards) > 4
    for name in shards:
        synced = recorder.position("fsync", state / f"{name}.part")
        final = recorder.position("replace", output / name)
        listed = recorder.position("fsync", output, after=final)
        journaled = min(
            recorder.position("replace", Path(path))
            for path in units
            if recorder.position("replace", Path(path)) > final
        )
        assert synced < final < listed < journaled
        writes = [
            i
            for i, (call, path) in enumerate(recorder.events)
            if call == "pwrite" and path == str(state / f"{name}.part")
        ]
        assert max(writes) < synced
    finals = [
        path for name, path in recorder.events if name == "replace" and Path(path).parent == output
    ]
    assert finals[-1].endswith("model.safetensors.index.json")
    assert finals[-2].endswith("ktconv.json")
    for path in [*finals[-4:], *units]:
        final = recorder.position("replace", Path(path))
        staged_name = state / f"{Path(path).name}.part"
        assert recorder.position("fsync", staged_name) < final
        assert recorder.position("fsync", Path(path).parent, after=final) > final


def test_order_of_folders(model: Path, tmp_path: Path) -> None:
    output, recorder = tmp_path / "output", Recorder()
    with hooked(recorder):
        done(model, output, "--layout=layers")
    state = output / STATE
    for index in (0, 1):
        folder = state / f"_layer_{index}.part"
        final = recorder.position("rename", output / f"_layer_{index}")
        synced = {path for call, path in recorder.events[:final] if call == "fsync"}
        for path in (output / f"_layer_{index}").rglob("*"):
            assert str(folder / path.relative_to(output / f"_layer_{index}")) in synced
        assert str(folder) in synced
        listed = recorder.position("fsync", output, after=final)
        assert listed < recorder.position("replace", state / f"layer-{index:05d}.json")


def test_names_of_directories_that_a_killed_run_left(model: Path, tmp_path: Path) -> None:
    """It may have been killed before it had made them durable; the next one sees no difference."""
    output, recorder = tmp_path / "a" / "output", Recorder()
    (output / STATE).mkdir(parents=True)
    with hooked(recorder):
        done(model, output)
    begun = recorder.position("replace", output / STATE / "run.json")
    for folder in (tmp_path, tmp_path / "a", output):
        assert recorder.position("fsync", folder) < begun


class Snapshots:
    """Copies OUTPUT ahead of every call; bytes that no fsync made durable become zeros,
    as after a power loss on a file system that delays allocation."""

    def __init__(self, output: Path, target: Path) -> None:
        self.output, self.target, self.count = output, target, 0
        self.sites = Sites()
        self._synced: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            if self.output.exists():
                self._copy(self.target / str(self.count))
                self.count += 1
                self.sites(name, arguments)
            if name == "fsync":
                status = os.fstat(arguments[0])
                self._synced[status.st_ino] = status.st_size, status.st_mtime_ns

    def _copy(self, target: Path) -> None:
        shutil.copytree(self.output, target, copy_function=self._copy_file, dirs_exist_ok=True)

    def _copy_file(self, source: str, target: str) -> None:
        try:
            status = Path(source).stat()
            shutil.copyfile(source, target)
        except FileNotFoundError:
            return  # renamed or removed by another thread meanwhile
        if self._synced.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
            Path(target).write_bytes(bytes(status.st_size))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_power_loss_at_every_call(
    model: Path, tmp_path: Path, clean_runs: CleanRuns, layout: str
) -> None:
    """What is there is sound after each; the run goes on from the first and last of each site."""
    options, (clean, _) = LAYOUTS[layout], clean_runs(layout)
    snapshots = tmp_path / "snapshots"
    taken = Snapshots(tmp_path / "output", snapshots)
    with hooked(taken, one_at_a_time=True):  # none changes what is being copied
        done(model, tmp_path / "output", *options, "--threads=1")
    assert taken.count > 40
    for number in range(taken.count):
        check_reader(snapshots / str(number), clean)
    for number in taken.sites.ends():
        after_crash = snapshots / str(number)
        done(model, after_crash, *options)
        assert contents(after_crash) == clean, f"after a crash at call {number}"


class Fault:
    """Raises at the k-th call for which `hits` is true."""

    def __init__(self, hits: Callable[[str], bool], k: int, code: int) -> None:
        self._hits, self.left, self.code, self.hit = hits, k, code, False
        self._lock = threading.Lock()

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            hits = self._hits(name)
            self.left -= hits
            if hits and self.left == 0:
                self.hit = True
                raise OSError(self.code, os.strerror(self.code), str(arguments[-1]))


NOT_EVERYWHERE = {("posix_fallocate", "layer folders"), ("rename", "shards"),
                  ("rename", "several shards per layer")}  # fmt: skip
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EIO: "the device reports an I/O error",
    errno.EROFS: "the file system is read-only",
}
CODES = list(REASONS)


def calls_from(site: Site) -> Callable[[str], bool]:
    return lambda name: call_site(name) == site


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_at_every_call_site(
    model: Path, tmp_path: Path, clean_runs: CleanRuns, call: str, layout: str
) -> None:
    """At the first and at the last call from each: with nothing finished and all but the end."""
    options, (clean, sites) = LAYOUTS[layout], clean_runs(layout)
    chosen = [(s, k) for s, count in sites.items() if s[0] == call for k in sorted({1, count})]
    assert chosen or (call, layout) in NOT_EVERYWHERE
    for number, (site, k) in enumerate(chosen):
        code, output = CODES[number % len(CODES)], tmp_path / str(number)
        fault = Fault(calls_from(site), k, code)
        with hooked(fault):
            result = run(model, output, *options)
        assert fault.hit, f"{site} {k}"
        refused(result, 3, REASONS[code], str(output.parent))  # whose fsync keeps its name
        check_reader(output, clean)
        assert staged(output) == [], f"{site} {k}"
        done(model, output, *options)
        assert contents(output) == clean, f"{site} {k}"


def test_finished_layers_survive_a_fault(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with hooked(
        Fault(lambda name: name == "replace", 4, errno.ENOSPC)
    ):  # run.json, shard, record, shard
        refused(run(model, output, "--threads=1"), 3, "the disk is full")
    finished = [path.name for path in output.glob("*.safetensors")]
    assert len(finished) == 1
    before = (output / finished[0]).stat().st_mtime_ns
    done(model, output)
    assert (output / finished[0]).stat().st_mtime_ns == before
