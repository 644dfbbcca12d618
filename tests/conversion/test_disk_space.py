"""Disks that are too small, full up on the way, or cannot be written."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import (
    STATE,
    check_reader,
    check_refusal,
    contents,
    done,
    refused,
    refused_in_json,
    remount,
    run,
    staged,
    stamps,
    tmpfs,
    words,
    write_model,
)

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.run import DISK_MARGIN
from ktconv.errors import ResourceError
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.targets.packed.target import Options

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=6)


def test_too_small_a_disk_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "disk", "size=40m") as disk:
        refused(run(model, disk / "output"), 3, "has 41.9 MB free, but", "are needed")
        assert list(disk.iterdir()) == []


def test_too_small_a_disk_by_its_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.system.machine.disk_free", lambda path: 1000)
    refused(run(model, tmp_path / "output"), 3, "has 1.0 kB free, but")
    assert not (tmp_path / "output").exists()


def test_dry_run_and_run_need_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one byte less than the dry run says, the run is refused, and with that many not; also
    where a part is there already."""
    output = tmp_path / "output"
    for layers, whole in (("--layers=0-2", False), ("--json", True)):
        facts = json.loads(done(model, output, layers, "--dry-run", "--json"))
        needed = facts["disk_needed_bytes"]
        assert (needed < facts["output_bytes"] + DISK_MARGIN) == whole  # layers 0-2 are there
        monkeypatch.setattr(
            "ktconv.system.machine.disk_free", lambda path, needed=needed: needed - 1
        )
        assert "NOT ENOUGH" in done(model, output, *[layers][whole:], "--dry-run")
        refused_in_json(run(model, output, layers, "--json"), 3, "free, but", "are needed")
        monkeypatch.setattr("ktconv.system.machine.disk_free", lambda path, needed=needed: needed)
        assert "NOT ENOUGH" not in done(model, output, *[layers][whole:], "--dry-run")
        done(model, output, *[layers][whole:])
    assert json.loads(done(model, output, "--dry-run", "--json"))["disk_needed_bytes"] == 0
    full = json.loads(done(model, output, "--dry-run", "--json", "--overwrite"))
    assert full["disk_needed_bytes"] == full["output_bytes"] + DISK_MARGIN


@pytest.mark.parametrize("options", [(), ("--finalize",)], ids=str)
def test_finished_output_that_cannot_be_written(
    model: Path, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has to be written, so nothing is: no lock, no state directory."""
    output = tmp_path / "output"
    done(model, output)
    before = stamps(output)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "unlink", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    assert "nothing to do" in done(model, output, *options)
    assert stamps(output) == before
    refused(run(model, output, "--method=int8"), 2, "options.method: int4 there, int8 now")


class FillDisk(Observer):
    """Leaves no byte free after the second unit."""

    def __init__(self, ballast: Path) -> None:
        self.ballast, self.units = ballast, 0

    def unit_finished(self, key: str) -> None:
        self.units += 1
        if self.units == 2:
            with self.ballast.open("wb", buffering=0) as file:
                while True:
                    try:
                        file.write(bytes(1 << 16))
                    except OSError:
                        break


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_disk_full_on_the_way(model: Path, tmp_path: Path, layout: str) -> None:
    done(model, tmp_path / "clean", f"--layout={layout}")
    clean = contents(tmp_path / "clean")
    with tmpfs(tmp_path / "disk", "size=80m") as disk:
        output, ballast = disk / "output", disk / "ballast"
        options = Options(numa=1, layout=layout)  # type: ignore[arg-type]
        with pytest.raises(ResourceError, match=f"{output}.*: the disk is full") as caught:
            quantize_cpu(Request(str(model), output, options, threads=1), FillDisk(ballast))
        assert caught.value.exit_code == 3 and "same command again" in str(caught.value.hint)
        assert staged(output) == []
        assert len(list((output / STATE).glob("layer-*.json"))) >= 2
        check_reader(output, clean)
        refused(run(model, output, f"--layout={layout}"), 3, "free, but")
        ballast.unlink()
        done(model, output, f"--layout={layout}")
        assert contents(output) == clean


def test_no_inode_left_on_the_way(model: Path, tmp_path: Path) -> None:
    done(model, tmp_path / "clean", "--layout=layers")
    clean = contents(tmp_path / "clean")
    with tmpfs(tmp_path / "disk", "size=200m,nr_inodes=90") as disk:
        output = disk / "output"
        result = run(model, output, "--layout=layers")
        refused(result, 3, str(output), "the disk is full")
        assert staged(output) == []
        assert list(output.glob("_layer_*"))
        check_reader(output, clean)
        remount(disk, "nr_inodes=10000")
        done(model, output, "--layout=layers")
        assert contents(output) == clean


def test_limit_on_the_size_of_files(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = subprocess.run(
        [sys.executable, "-m", "ktconv", *words(model, output)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    check_refusal(
        process.returncode, process.stdout, process.stderr, 3,
        str(output / STATE), ".safetensors.part", "files this large are not allowed here",
    )  # fmt: skip
    assert not output.exists()


@pytest.mark.parametrize("where", ["output", "."])
def test_read_only_disk(model: Path, tmp_path: Path, where: str) -> None:
    with tmpfs(tmp_path / "disk", "size=80m") as disk:
        remount(disk, "ro")
        refused(run(model, disk / where), 3, str(disk), "the file system is read-only")
        assert list(disk.iterdir()) == []


def test_disk_that_became_read_only(model: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=100m") as disk:
        done(model, disk / "output", "--layers=0")
        before = contents(disk)
        remount(disk, "ro")
        refused(run(model, disk / "output"), 3, "the file system is read-only")
        assert contents(disk) == before


def test_output_without_permission_to_write(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    refused(run(model, tmp_path / "output"), 3, str(tmp_path / "output"), "permission denied")
    assert not (tmp_path / "output").exists()


class DeniesNewNames:
    """mkdir of a file system that has none of the names it is asked to make."""

    def __init__(self, first: type[BaseException] = FileNotFoundError) -> None:
        self.first, self.calls = first, 0

    def __call__(self, path: Path, *_: object, **__: object) -> None:
        self.calls += 1
        assert self.calls < 1000, "tried for ever"
        kind = self.first if self.calls == 1 else FileNotFoundError
        raise kind(2, "No such file or directory", str(path))


def test_a_directory_that_never_comes_to_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on /proc and stale network mounts."""
    denies = DeniesNewNames()
    monkeypatch.setattr(Path, "mkdir", lambda *words, **named: denies(*words, **named))
    refused(run(model, tmp_path / "a" / "b"), 3, f"cannot create directory {tmp_path / 'a'}")
    assert denies.calls < 100


def test_one_interrupt_ends_a_run_that_cannot_make_its_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denies = DeniesNewNames(KeyboardInterrupt)
    monkeypatch.setattr(Path, "mkdir", lambda *words, **named: denies(*words, **named))
    assert run(model, tmp_path / "output").exit_code == 130
    assert denies.calls == 1


def test_an_empty_output_directory_is_removed_if_no_state_fits_into_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def refuse(self: Path, *words: object, **named: object) -> None:
        if self.name == STATE:
            raise PermissionError(13, "Permission denied", str(self))
        mkdir(self, *words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    refused(run(model, tmp_path / "output"), 3, STATE, "permission denied")
    assert not (tmp_path / "output").exists()


def test_output_that_may_not_even_be_looked_at(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def refuse(self: Path, **named: bool) -> object:
        if self.name == "secret":
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **named)

    monkeypatch.setattr(Path, "stat", refuse)
    refused(run(model, tmp_path / "secret" / "output"), 3, "secret", "ermission denied")


def test_a_report_says_what_was_free_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to what the run needed; what it leaves free is another number."""
    free = iter(range(10**9, 0, -1))
    monkeypatch.setattr("ktconv.system.machine.disk_free", lambda path: next(free))
    facts = json.loads(done(model, tmp_path / "output", "--json"))
    assert facts["disk_free_bytes"] == 10**9
