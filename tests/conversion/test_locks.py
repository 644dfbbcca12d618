"""Several runs into one OUTPUT: the same work is refused, shared work is one conversion."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.cli import (
    STATE,
    check_reader,
    contents,
    done,
    refused,
    run,
    staged,
    start,
    words,
    write_model,
)
from helpers.disk_calls import Commands

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.run import Report
from ktconv.errors import OutputError
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.targets.packed.target import Options
from ktconv.writer.journal import Journal, OutputLock

pytestmark = [pytest.mark.slow, pytest.mark.process]

LAYERS = 12
# Of the calls that change the disk: three units are staged, and the second one is written while the
# first is made final.
STOPPED_AT = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=LAYERS)


@pytest.fixture(scope="module")
def clean(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("clean") / "output"
    done(model, output)
    return contents(output)


@pytest.fixture(autouse=True)
def nobody_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has locks here keeps them: nobody in this process waits for one that was killed."""
    monkeypatch.setattr("ktconv.writer.journal.ENDING_SECONDS", 0.0)


class Held(Observer):
    """Stops a conversion when it starts unit `key`, until `go` is set."""

    def __init__(self, key: str) -> None:
        self.key, self.there, self.go = key, threading.Event(), threading.Event()

    def unit_started(self, key: str) -> None:
        if key == self.key:
            self.there.set()
            self.go.wait()


@contextmanager
def held(model: Path, output: Path, key: str, **request: object) -> Iterator[list[Report]]:
    """A conversion in a thread that is stuck at unit `key` inside the block."""
    observer, reports = Held(key), []
    asked = Request(str(model), output, Options(numa=1), threads=2, **request)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: reports.append(quantize_cpu(asked, observer)))
    thread.start()
    try:
        while not observer.there.wait(1):
            assert thread.is_alive(), f"the conversion never came to {key}"
        yield reports
    finally:
        observer.go.set()
        thread.join()


@contextmanager
def stopped(model: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A conversion in a process of its own that is frozen in the middle of its units."""
    process = start(model, output, "--threads=1", stop_at=STOPPED_AT)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    assert any("safetensors.part" in name for name in staged(output))
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)


def test_second_run_in_another_process_is_refused(
    model: Path, tmp_path: Path, clean: dict[str, str]
) -> None:
    output = tmp_path / "output"
    with stopped(model, output) as process:
        refused(run(model, output), 2, "another ktconv is converting layers 0-11", str(output))
        refused(run(model, output, "--layers=3"), 2, "another ktconv is converting layer 3")
        refused(run(model, output, "--overwrite"), 2, "another ktconv is converting this model")
        refused(run(model, output, "--finalize"), 2, "missing")
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert contents(output) == clean


def test_second_run_in_another_thread_is_refused(
    model: Path, tmp_path: Path, clean: dict[str, str]
) -> None:
    output = tmp_path / "output"
    with held(model, output, "layer-00002") as reports:
        link = tmp_path / "link"
        link.symlink_to(output)
        for spelling in (output, link, tmp_path / "x" / ".." / "output"):
            with pytest.raises(OutputError, match="another ktconv is converting layers 0-11"):
                quantize_cpu(Request(str(model), spelling, Options(numa=1)))
    assert reports[0].complete
    assert contents(output) == clean


def test_refused_run_does_not_drop_the_locks_of_the_first(
    commands: Commands, model: Path, tmp_path: Path
) -> None:
    """POSIX locks vanish when a process closes any descriptor of the file."""
    output = tmp_path / "output"
    with held(model, output, "layer-00002"):
        with pytest.raises(OutputError):
            quantize_cpu(Request(str(model), output, Options(numa=1)))
        ended = commands.run(words(model, output))
        assert ended.returncode == 2 and "another ktconv" in ended.stderr


def test_kill_9_releases_the_locks(model: Path, tmp_path: Path, clean: dict[str, str]) -> None:
    output = tmp_path / "output"
    with stopped(model, output) as process:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done(model, output)
    assert contents(output) == clean


def test_staged_files_of_another_run_are_left_alone(
    model: Path, tmp_path: Path, clean: dict[str, str]
) -> None:
    output = tmp_path / "output"
    with held(model, output, "other-00001", layers=[0]) as reports:
        before = staged(output)
        assert any("model-00013" in name for name in before)
        assert "is incomplete: missing layers" in done(model, output, "--layers=1-10")
        assert set(before) <= set(staged(output))
    assert not reports[0].complete
    assert "is complete" in done(model, output, "--layers=11")
    assert contents(output) == clean


def test_others_wait_for_who_comes_last(model: Path, tmp_path: Path, clean: dict[str, str]) -> None:
    """A run that is done while another is at work neither writes the index nor fails."""
    output = tmp_path / "output"
    with held(model, output, "layer-00011", layers=[11]) as reports:
        text = done(model, output, "--layers=0-10")
        assert "is incomplete: missing layer 11" in text
        assert not (output / "model.safetensors.index.json").exists()
    assert reports[0].complete
    assert contents(output) == clean


def test_all_units_there_but_another_run_is_at_work(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    done(model, output, "--layers=0-10")
    other = OutputLock(Journal(output))
    with other.setup_lock():
        other.acquire([3], "layer 3")
    assert "will finalize it; if it fails, run with --finalize" in done(
        model, output, "--layers=11"
    )
    refused(run(model, output, "--finalize"), 2, "another ktconv is converting this model")
    other.release()
    assert "is complete" in done(model, output, "--finalize")


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_disjoint_layers_in_processes_at_once(
    commands: Commands, model: Path, tmp_path: Path, layout: str
) -> None:
    done(model, tmp_path / "clean", f"--layout={layout}")
    output = tmp_path / "output"
    parts = ("0-3", "4-7", "8-11")
    options = (f"--layout={layout}", "--threads=1")
    ended = commands.run_at_once(
        *(words(model, output, f"--layers={part}", *options) for part in parts)
    )
    assert [one.returncode for one in ended] == [0, 0, 0], ended
    assert sum("is complete" in one.stdout for one in ended) >= 1
    assert contents(output) == contents(tmp_path / "clean")


def test_disjoint_layers_in_threads_many_times(tmp_path: Path) -> None:
    """Beginnings and ends that meet: the setup lock lets one in at a time."""
    model = write_model(tmp_path / "model", layers=3, experts=1)
    done(model, tmp_path / "clean")
    clean = contents(tmp_path / "clean")
    for number in range(10):
        output = tmp_path / str(number)
        failures: list[object] = []

        def convert(layer: int, output: Path = output, failures: list[object] = failures) -> None:
            request = Request(str(model), output, Options(numa=1), [layer], threads=1)
            try:
                quantize_cpu(request)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=convert, args=[layer]) for layer in range(3)]
        for delay, thread in enumerate(threads):
            time.sleep(0.001 * delay * (number % 5))  # variety; the outcome is the same
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert contents(output) == clean


def test_same_command_many_times_at_once(commands: Commands, tmp_path: Path) -> None:
    """One does the work, the others are refused or find nothing to do; none breaks."""
    model = write_model(tmp_path / "model", layers=3, experts=1)
    output = tmp_path / "output"
    ended = commands.run_at_once(*[words(model, output)] * 5)
    for one in ended:
        assert one.returncode == 0 or "another ktconv" in one.stderr, one.stderr
    assert 0 in {one.returncode for one in ended}
    done(model, tmp_path / "clean")
    assert contents(output) == contents(tmp_path / "clean")


def test_finalize_names_what_is_missing_and_completes_later(
    model: Path, tmp_path: Path, clean: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    done(model, output, "--layers=0-2,5")
    before = contents(output)
    refused(run(model, output, "--finalize"), 2, "layers 3-4,6-11 missing")
    assert contents(output) == before
    (output / STATE / "other-00001.json").unlink()
    refused(
        run(model, output, "--finalize"), 2,
        "layers 3-4,6-11 and non-expert tensors missing",
    )  # fmt: skip
    with monkeypatch.context() as patch:  # the last run is interrupted before its index
        patch.setattr("ktconv.conversion.run.copy_sidecars", _interrupt)
        assert run(model, output).exit_code == 130
    check_reader(output, clean)
    assert not (output / "model.safetensors.index.json").exists()
    assert "is complete" in done(model, output, "--finalize")
    assert contents(output) == clean


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_output_that_another_run_removes(
    model: Path, tmp_path: Path, clean: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--finalize, which finds nothing to do, while this run looks what is there."""
    output, iterdir = tmp_path / "output", Path.iterdir
    output.mkdir()

    def removed(path: Path) -> Iterator[Path]:
        if path == output and not list(iterdir(path)):
            path.rmdir()
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", removed)
    done(model, output)
    monkeypatch.undo()
    assert contents(output) == clean


def test_finalize_of_nothing_leaves_no_trace(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "output", "--finalize")
    refused(result, 2, "layers 0-11 and non-expert tensors missing")
    assert not (tmp_path / "output").exists()


def test_finalize_and_overwrite_exclude_each_other(
    model: Path, tmp_path: Path, clean: dict[str, str]
) -> None:
    done(model, tmp_path / "output")
    refused(run(model, tmp_path / "output", "--finalize", "--overwrite"), 2, "--finalize")
    assert contents(tmp_path / "output") == clean


def test_parts_with_other_options_are_refused(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with held(model, output, "layer-00000", layers=[0]):
        result = run(model, output, "--layers=1", "--method=int8")
        refused(result, 2, "options.method: int4 there, int8 now")


def test_waiting_for_the_setup_lock_has_an_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.writer.journal.SETUP_LOCK_TIMEOUT", 0.05)
    with OutputLock(Journal(tmp_path / "output")).setup_lock():
        refused(run(model, tmp_path / "output"), 2, "timed out waiting for another ktconv")


def test_who_waits_for_the_setup_lock_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.writer.journal.SETUP_NOTICE_SECONDS", -1.0)
    output, notices = tmp_path / "output", []
    holder = contextlib.ExitStack()
    holder.enter_context(OutputLock(Journal(output)).setup_lock())

    def noticed(text: str) -> None:
        notices.append(text)
        holder.close()  # the first leaves: nothing here depends on time

    with OutputLock(Journal(output)).setup_lock(noticed):
        pass
    assert len(notices) == 1
    assert "waiting for another ktconv" in notices[0] and str(output) in notices[0]


def test_who_waits_for_the_setup_lock_names_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.writer.journal.SETUP_LOCK_TIMEOUT", -1.0)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from ktconv.writer.journal import Journal, OutputLock\n"
        "with OutputLock(Journal(Path(sys.argv[1]))).setup_lock():\n"
        "    print(flush=True)\n    input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "output")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        lock = OutputLock(Journal(tmp_path / "output"))
        with pytest.raises(OutputError, match=rf"process {process.pid}\)"), lock.setup_lock():
            pass
        process.communicate(b"\n")


def test_an_interrupted_run_does_not_wait_for_the_setup_lock_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run begins or finishes, and whoever waits for it is interrupted."""
    tries: list[bool] = []

    def locked_by_another(lock: OutputLock) -> bool:
        Journal(tmp_path / "output").create()
        tries.append(False)
        assert len(tries) < 10
        return False

    monkeypatch.setattr(OutputLock, "_try_setup_lock", locked_by_another)
    monkeypatch.setattr("ktconv.writer.journal.SETUP_NOTICE_SECONDS", -1.0)
    monkeypatch.setattr("ktconv.conversion.run.WITHDRAW_SECONDS", -1.0)
    monkeypatch.setattr(Observer, "noted", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize_cpu(Request(str(model), tmp_path / "output", Options(numa=1)))


def test_lock_file_that_was_removed_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the setup lock of a finished conversion gets a new lock file."""
    journal = Journal(tmp_path / "output")
    first, second = OutputLock(journal), OutputLock(journal)
    entered: list[bool] = []
    tries: list[bool] = []  # of the second, to get in
    try_setup_lock = OutputLock._try_setup_lock

    def noticed(lock: OutputLock) -> bool:
        inside = try_setup_lock(lock)
        if lock is second:
            tries.append(inside)
        return inside

    monkeypatch.setattr(OutputLock, "_try_setup_lock", noticed)

    def enter() -> None:
        with second.setup_lock():
            entered.append((journal.directory / "lock").exists())
        second.release()

    with first.setup_lock():
        thread = threading.Thread(target=enter)
        thread.start()
        while not tries:
            assert thread.is_alive()
        assert tries[0] is False and entered == []
        (journal.directory / "lock").unlink()
        journal.directory.rmdir()
    first.release()
    thread.join()
    assert entered == [True]
