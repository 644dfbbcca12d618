"""How commands end: lost streams, signals at known points, errors as JSON, ways out that exist."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from click import IntRange
from click.exceptions import Exit
from click.testing import CliRunner
from helpers.cli import contents, done, refused, refused_in_json, run, write_model
from helpers.disk_calls import CLOSED, READER_LEFT, Commands, Ended
from helpers.faults import read_zeros
from helpers.paths import EXAMPLE

from ktconv.cli import bench as bench_command
from ktconv.cli import exits, options
from ktconv.cli import stats as stats_command
from ktconv.cli import verify as verify_command
from ktconv.cli.app import app
from ktconv.cli.help import choices_of
from ktconv.cli.process import OutputStream
from ktconv.cli.repack import RESHARD_HINTS
from ktconv.errors import KtconvError
from ktconv.stats.counts import LayerCounts, Statistics

pytestmark = [pytest.mark.slow, pytest.mark.process]

COMMANDS: dict[str, Any] = dict(app.commands)
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=2, inner=256)


@pytest.fixture(scope="module")
def output(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("shards") / "output"
    done(model, output)
    return output


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("folders") / "output"
    done(model, output, "--layout=layers", "--numa=1")
    return output


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


# ---- streams that are closed, full, or have lost their reader --------------------------

Words = Callable[[Path, Path, Path, Path], list[object]]  # of model, output, folders, new
WORKING: dict[str, Words] = {
    "help": lambda *_: ["--help"],
    "version": lambda *_: ["--version"],
    "help of a command": lambda *_: ["verify", "--help"],
    "doctor": lambda *_: ["doctor"],
    "inspect": lambda model, *_: ["inspect", model],
    "quantize-cpu": lambda model, output, folders, new: ["quantize-cpu", model, new, "--numa=1"],
    "verify": lambda model, output, *_: ["verify", output],
    "verify A B": lambda model, output, folders, _: ["verify", output, folders],
    "merge": lambda model, output, folders, new: ["merge", folders, new],
    "reshard": lambda model, output, folders, new: ["reshard", output, new, "--numa=2"],
}


REAL = ("help", "quantize-cpu")  # interpreters of their own: Python begins and ends like this, too


def lost_to(kind: int) -> list[str]:
    """All commands print the same way: each meets one kind of lost streams, two of them all."""
    return [name for number, name in enumerate(WORKING) if number % 3 == kind or name in REAL]


def dead_pipe() -> int:
    """The writing end of a pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    return write


def in_process(words: Sequence[object], **streams: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ktconv", *map(str, words)]
    return subprocess.run(command, check=False, **streams)


@pytest.mark.parametrize("name", lost_to(0))
def test_without_streams(
    name: str, commands: Commands, model: Path, output: Path, folders: Path, tmp_path: Path
) -> None:
    """Descriptors 0, 1 and 2 are closed: no file of ours may get their numbers."""
    words = WORKING[name](model, output, folders, tmp_path / "new")
    ended: subprocess.CompletedProcess[bytes] | Ended
    if name in REAL:
        ended = in_process(words, preexec_fn=lambda: os.closerange(0, 3))
    else:
        ended = commands.run(words, lost=dict.fromkeys(range(3), CLOSED))
    assert ended.returncode == 0
    if name == "quantize-cpu":
        assert contents(tmp_path / "new") == contents(output)


@pytest.mark.parametrize("name", lost_to(1))
def test_with_readers_that_left(
    name: str, commands: Commands, model: Path, output: Path, folders: Path, tmp_path: Path
) -> None:
    """Whatever is written meets a broken pipe, also what Python writes when it ends."""
    words = WORKING[name](model, output, folders, tmp_path / "new")
    if name in REAL:
        dead = dead_pipe()
        assert in_process(words, stdout=dead, stderr=dead).returncode == 0
        os.close(dead)
    else:
        assert commands.run(words, lost=dict.fromkeys((1, 2), READER_LEFT)).returncode == 0


@pytest.mark.parametrize("name", lost_to(2))
def test_with_a_full_disk_under_stdout(
    name: str, commands: Commands, model: Path, output: Path, folders: Path, tmp_path: Path
) -> None:
    words = WORKING[name](model, output, folders, tmp_path / "new")
    if name in REAL:
        with Path("/dev/full").open("w") as full:
            real = in_process(words, stdout=full, stderr=subprocess.PIPE)
        code, said = real.returncode, real.stderr.decode()
    else:
        ended = commands.run(words, lost={1: "/dev/full"})
        code, said = ended.returncode, ended.stderr
    assert code == 3
    assert "Error: the operating system reported an error: No space left on device." in said
    assert "Traceback" not in said and "ignored" not in said


@pytest.fixture(scope="module")
def failing(
    output: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[object], int]]:
    """A failed check and two kinds of wrong usage, and their codes."""
    broken = tmp_path_factory.mktemp("failing") / "broken"
    shutil.copytree(output, broken)
    os.truncate(next(broken.glob("*.safetensors")), 100)
    return [(["verify", broken], 1), (["inspect", "nowhere"], 2), (["--no"], 2)]


@pytest.mark.parametrize("closed", [[0], [1], [2], [1, 2]], ids=str)
def test_failures_keep_their_codes_without_streams(
    closed: list[int], commands: Commands, failing: list[tuple[list[object], int]]
) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    for words, code in failing:
        assert commands.run(words, lost=dict.fromkeys(closed, CLOSED)).returncode == code
    if closed == [1, 2]:
        words, code = failing[0]
        assert in_process(words, preexec_fn=close).returncode == code


def test_failures_keep_their_codes_with_readers_that_left(
    commands: Commands, failing: list[tuple[list[object], int]]
) -> None:
    for words, code in failing:
        assert commands.run(words, lost=dict.fromkeys((1, 2), READER_LEFT)).returncode == code
    words, code = failing[0]
    dead = dead_pipe()
    assert in_process(words, stdout=dead, stderr=dead).returncode == code
    os.close(dead)


def test_a_reader_that_does_not_block_is_waited_for() -> None:
    """Terminals and pipes that another program switched to non-blocking."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    received: list[bytes] = []

    def drain() -> None:
        with os.fdopen(read, "rb") as pipe:
            received.append(pipe.read())

    reader = threading.Thread(target=drain)
    stream = io.BufferedWriter(OutputStream(write, BrokenPipeError))
    reader.start()
    stream.write(bytes(1 << 20))
    stream.flush()
    os.close(write)
    reader.join()
    assert received == [bytes(1 << 20)]


def test_only_the_first_failure_of_stdout_is_raised() -> None:
    """Python tries again when it ends, and would change the exit code."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        stream = OutputStream(full.fileno(), BrokenPipeError)
        with pytest.raises(OSError, match="No space left"):
            stream.write(b"x")
        assert stream.write(b"xyz") == 3


# ---- signals ---------------------------------------------------------------------------

AT_IMPORT = """
import os, sys

class Here:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)

module, number = sys.argv[1], int(sys.argv[2])
sys.meta_path.insert(0, Here())
sys.argv = ["ktconv", *sys.argv[3:]]
if "SIGNALLED" in os.environ:
    import signalled
from ktconv.cli.entry import main
main()
"""
HELPERS = str(Path(helpers.__file__ or "").parent)


def python(code: str, *words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize(
    ("module", "number"),
    [
        *(("ktconv.cli.app", number) for number in INTERRUPTS),
        *zip(("click", "ktconv.inspect.inspection", "numpy"), INTERRUPTS, strict=True),
    ],
)
def test_a_signal_during_imports(module: str, number: int, model: Path) -> None:
    ended = python(AT_IMPORT, module, int(number), "inspect", model)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("number", INTERRUPTS)
def test_a_signal_that_is_ignored_stays_ignored(number: int, model: Path, tmp_path: Path) -> None:
    """nohup, and shells that start something in the background. During imports and work."""

    def ignore() -> None:
        signal.signal(number, signal.SIG_IGN)

    words = ["quantize-cpu", model, tmp_path / "out", "--numa=1", "--threads=1"]
    variables = os.environ | {"PYTHONPATH": HELPERS, "SIGNALLED": f"{int(number)} 0 1e9"}
    ended = python(AT_IMPORT, "numpy", int(number), *words, preexec_fn=ignore, env=variables)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def signalling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands that send themselves signals."""
    server = Commands(tmp_path_factory.mktemp("signalling"), "signalled", SIGNALLED="0 0 0")
    yield server
    server.close()


Interrupted = Callable[..., list[str]]


@pytest.fixture
def interrupted(signalling: Commands, model: Path) -> Interrupted:
    """Lines of a run that gets a signal at its second write, and another as it cleans up."""

    def run(number: int, again: int, patience: float, output: Path, *more: str) -> list[str]:
        words = ["quantize-cpu", model, output, *more, "--numa=1", "--threads=1"]
        signals = {"SIGNALLED": f"{int(number)} {int(again)} {patience}"}
        ended = signalling.run(words, variables=signals)
        assert ended.returncode == 130, ended.stderr
        lines = [line for line in ended.stderr.splitlines() if line and " done, " not in line]
        assert len(lines) == 1 and lines[0].startswith("Interrupted. "), ended.stderr
        if "--json" in more:
            error = json.loads(ended.stdout)["error"]
            assert error == {
                "message": "interrupted",
                "hint": lines[0].removeprefix("Interrupted. "),
                "exit_code": 130,
            }
        else:
            assert ended.stdout == ""
        return lines

    return run


@pytest.mark.parametrize(
    ("number", "again"),
    [
        *((number, 0) for number in INTERRUPTS),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGHUP),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_signal_during_work(
    number: int, again: int, interrupted: Interrupted, model: Path, output: Path, tmp_path: Path
) -> None:
    """A repeated one, as a terminal and a parent can send the same, does not disturb the end."""
    new = tmp_path / "new"
    (line,) = interrupted(number, again, 1e9, new, *(["--json"] if again else []))
    assert f"run the same command again to continue in {new}" in line
    assert not list((new / ".ktconv").glob("*.part"))
    done(model, new)
    assert contents(new) == contents(output)


@pytest.mark.parametrize("again", INTERRUPTS)
def test_another_signal_ends_the_process_at_once(
    again: int, interrupted: Interrupted, model: Path, output: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    interrupted(signal.SIGINT, again, -1, new)
    assert list((new / ".ktconv").glob("*.part"))  # nothing more was cleaned up
    done(model, new)
    assert contents(new) == contents(output)


def test_interrupted_before_anything_was_finished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ktconv.conversion.run.Pipeline.run", interrupt)
    result = run(model, tmp_path / "new")
    assert (result.exit_code, result.stderr.strip()) == (130, "Interrupted. Nothing was written.")
    assert not (tmp_path / "new").exists()


# ---- errors as JSON --------------------------------------------------------------------

FAILING: dict[str, list[object]] = {
    "inspect": ["nowhere"],
    "quantize-cpu": ["nowhere", "out"],
    "quantize-gpu": ["nowhere", "out"],
    "merge": ["nowhere", "out"],
    "reshard": ["nowhere", "out", "--numa=2"],
    "verify": ["nowhere"],
    "stats": ["nowhere"],
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_one_json_document(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(invoke(name, *FAILING[name]), 2)
    refused_in_json(invoke(name, *FAILING[name], "--json"), 2)


def _has_json(name: str) -> bool:
    return any("--json" in parameter.opts for parameter in COMMANDS[name].params)


@pytest.mark.parametrize("words", [["--format", "json"], ["--format=json"]])
def test_a_failure_of_bench_is_one_json_document(words: list[str]) -> None:
    refused_in_json(invoke("bench", "--method", "int3", *words), 2, "unknown method")
    for wrong in ("--numa=-1", "--method="):
        document = json.loads(invoke("bench", *words, wrong).stdout)
        assert document["error"]["exit_code"] == 2


@pytest.mark.parametrize("name", [name for name in COMMANDS if _has_json(name)])
def test_wrong_words_are_one_json_document(name: str) -> None:
    result = invoke(name, "--json", "--no-such-option")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == error["exit_code"] == 2
    assert "--no-such-option" in error["message"] and "--no-such-option" in result.stderr


def test_a_failed_check_is_one_json_document(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.writer.staging import ShardStaging

    monkeypatch.setattr(ShardStaging, "read", read_zeros)
    found = run(model, tmp_path / "out", "--json", "--threads", "1")  # of several the fastest fails
    refused_in_json(found, 1, "blk.0")


# ---- ways out --------------------------------------------------------------------------

HINTS: dict[str, Mapping[type[BaseException], str]] = {
    "quantize-cpu": options.MODEL_HINTS,
    "quantize-gpu": options.MODEL_HINTS,
    "merge": options.PACKED_HINTS,
    "reshard": RESHARD_HINTS,
    "verify": verify_command._HINTS,
    "stats": stats_command._HINTS,
    "bench": bench_command._HINTS,
}


@pytest.mark.parametrize("name", HINTS)
def test_hints_name_options_that_the_command_has(name: str) -> None:
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    for hint in HINTS[name].values():
        assert set(re.findall("--[a-z-]+", hint)) <= known


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def hint_of(result: Any, code: int) -> str:
    refused(result, code)
    return str(result.stderr.split("Hint: ")[1])


def test_hint_for_a_disk_that_is_too_small(
    model: Path, output: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where a part can be converted is that a way out."""
    monkeypatch.setattr("ktconv.system.machine.disk_free", lambda path: 1000)
    new = tmp_path / "new"
    assert "--layers" in hint_of(run(model, new), 3)
    for words in (["merge", folders, new], ["reshard", output, new, "--numa=2"]):
        assert "--layers" not in hint_of(invoke(*words), 3)


def test_a_disk_that_fills_up(
    model: Path, output: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    new = tmp_path / "new"
    for words in (
        ["quantize-cpu", model, new],
        ["merge", folders, new],
        ["reshard", output, new, "--numa=2"],
    ):
        assert "finished layers are kept" in hint_of(invoke(*words), 3)


def test_a_disk_that_fills_up_with_a_file_that_an_option_names(
    model: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer of it is kept, and the output may be on another disk."""
    report = tmp_path / "report.html"
    counts, hot, recipe = tmp_path / "counts.json", tmp_path / "hot.json", tmp_path / "recipe.toml"
    statistics = Statistics([LayerCounts(0, 3, np.array([3, 2, 1, 0]))], {})
    counts.write_text(json.dumps({"schema": 1, **statistics.facts(2, None)}))
    monkeypatch.setattr(os, "fsync", full)
    result = invoke("verify", output, "--report", report)
    assert result.exit_code == 3 and "layers are kept" not in result.stderr
    assert "Hint: free some space, or name a file on another disk" in result.stderr
    for words in (
        ["stats", counts, "--hot=2", "--write", hot],
        [
            "quantize-cpu", model, tmp_path / "new", "--target-bits=8.5",
            "--methods=fp8-channel,bf16", "--write-recipe", recipe,
        ],
    ):  # fmt: skip
        result = invoke(*words)
        assert result.exit_code == 3 and result.stdout == ""
        assert "Hint: free some space, or name a file on another disk" in result.stderr
        assert "kept" not in result.stderr
    assert not hot.exists() and not recipe.exists() and not report.exists()
    assert not (tmp_path / "new").exists()


def test_too_little_memory(
    model: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ktconv.bench.command.bench", ended)
    monkeypatch.setattr("ktconv.verify.command.verify", ended)
    monkeypatch.setattr("ktconv.conversion.pipeline.Pipeline.run", ended)
    monkeypatch.setattr("ktconv.inspect.inspection.inspect_path", ended)
    assert "--threads" in hint_of(run(model, tmp_path / "new"), 3)
    assert "--experts" in hint_of(invoke("bench", "--shape", "128,128,4,2"), 3)
    assert "--tokens" in hint_of(invoke("verify", output), 3)
    assert "Hint" not in invoke("inspect", model).stderr


@pytest.mark.parametrize("kilobytes", [30_000, 60_000, 100_000, 130_000, 150_000, 180_000, 220_000])
def test_too_little_address_space_to_start(kilobytes: int, model: Path, tmp_path: Path) -> None:
    """OpenBLAS ends a process by itself then, with exit code 1: a check failed. Or, with the newest
    NumPy for Python 3.10, it never stops asking for memory."""
    words = [sys.executable, "-m", "ktconv", "quantize-cpu", str(model), str(tmp_path / "out")]
    limit = kilobytes * 1024
    done = subprocess.run(
        [*words, "--json"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode in (0, 3), done.stderr
    if done.returncode == 3:
        assert "Error: " in done.stderr and "Hint: " in done.stderr
        assert "Traceback" not in done.stderr and "OpenBLAS" not in done.stderr
        assert json.loads(done.stdout)["error"]["exit_code"] == 3
    assert done.returncode == 3 or kilobytes > 180_000


@pytest.mark.parametrize("allowed", range(5))
def test_a_system_that_allows_no_more_threads(
    allowed: int, model: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread it refuses, those before it end, and nothing is left behind."""
    before, start = threading.active_count(), threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    new = tmp_path / "new"
    for words in (
        ["quantize-cpu", model, new, "--threads=4"],
        ["reshard", output, new, "--numa=2", "--threads=4"],
    ):
        started.clear()
        shutil.rmtree(new, ignore_errors=True)
        result = invoke(*words)
        assert "cannot start another thread" in result.stderr
        assert "ulimit -u" in hint_of(result, 3)
        assert threading.active_count() == before
        assert not list(new.rglob("*.part"))
        if allowed <= 2:  # no worker began; one that did can have finished a layer, which stays
            assert not new.exists()


def test_a_limit_that_reshard_cannot_raise(model: Path, output: Path, tmp_path: Path) -> None:
    words = ["--numa=2", "--source", model, "--threads=4096"]
    hint = hint_of(invoke("reshard", output, tmp_path / "new", *words), 3)
    assert hint == "use fewer --threads.\n"


def test_a_source_that_changes_while_it_is_verified(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.errors import SourceChangedError

    def changed(*_: object) -> None:
        raise SourceChangedError("model.safetensors changed while it was read", "--overwrite")

    monkeypatch.setattr("ktconv.source.reading.reader.SourceReader._refuse_changed", changed)
    hint = hint_of(invoke("verify", output, "--source", model, "--level", "weights"), 2)
    assert "--overwrite" not in hint


def test_a_hint_of_the_command_precedes_that_of_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class OneError(KtconvError):
        pass

    cases: list[tuple[type[BaseException], str, str]] = [
        (OneError, "way out", "way out"),
        (OSError, "x", "library's"),
    ]
    for error, hint, shown in cases:
        with pytest.raises(Exit), exits.errors_shown(False, {error: hint}):
            raise OneError("wrong", "library's")
        assert capsys.readouterr().err == f"Error: wrong.\nHint: {shown}.\n"


# ---- places ----------------------------------------------------------------------------


def test_places_that_take_no_files_are_refused_before_any_work(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc lets root do anything but make a file."""
    pytest.importorskip("matplotlib")

    def worked(*_: object, **__: object) -> None:
        pytest.fail("worked before it looked")

    for name in ("bench.command.bench", "verify.command.prepare", "stats.command._prepared"):
        monkeypatch.setattr(f"ktconv.{name}", worked)
    for words in (
        ["bench", "--plot", "/proc/x.png"],
        ["verify", output, "--report", "/proc/x.html"],
        ["stats", model, "--hot", 1, "--write", "/proc/x.json"],
        ["stats", model, "--trace", "/proc/x.safetensors"],
    ):
        result = invoke(*words)
        assert result.exit_code in (2, 3) and f"{words[-1]}" in result.stderr


def test_an_output_inside_of_the_model_by_another_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount: another path, the same directory."""
    mount, samefile = tmp_path / "mount", Path.samefile
    mount.mkdir()

    def same(self: Path, other: Path) -> bool:
        return samefile(model if self == mount else self, other)

    monkeypatch.setattr(Path, "samefile", same)
    refused(run(model, mount / "a" / "b"), 2, "inside the model directory")
    assert list(mount.iterdir()) == []


def test_links_in_a_circle(model: Path, output: Path, folders: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    for words in (
        ["quantize-cpu", model, one, "--numa=1"],
        ["quantize-cpu", model, one / "below", "--numa=1"],
        ["merge", folders, one],
        ["reshard", output, one, "--numa=2"],
    ):
        assert str(one) in refused(invoke(*words), 3, "Too many levels of symbolic links")
    for words in (["inspect", one], ["verify", one], ["quantize-cpu", one, tmp_path / "new"]):
        refused(invoke(*words), 2)


# ---- options ---------------------------------------------------------------------------


def test_a_value_may_end_like_an_option(model: Path, tmp_path: Path) -> None:
    """As folders do that are named after a column of a table."""
    text = tmp_path / "lang=en="
    result = invoke("stats", model, f"--text={text}")
    assert "is empty" not in result.stderr and str(text) in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_value_is_refused(name: str, tmp_path: Path) -> None:
    """A variable of a shell that is not set: not all layers, not the current directory."""
    before = ["x"] * sum(p.param_type_name == "argument" for p in COMMANDS[name].params)
    options = [
        parameter.opts[0]
        for parameter in COMMANDS[name].params
        if parameter.param_type_name == "option" and not parameter.is_flag
    ]
    for option in options:
        for words in ([option, ""], [f"{option}="]):
            assert f"{option} is empty" in refused(invoke(name, *before, *words), 2)
    for position in range(len(before)):
        words = [*before[:position], "", *before[position + 1 :]]
        assert "an argument is empty" in refused(invoke(name, *words), 2)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_values_in_words_of_people(name: str) -> None:
    assert not re.search(r"<(int|float|list)|range>", invoke(name, "--help").stdout)
    for parameter in COMMANDS[name].params:
        assert parameter.metavar or parameter.is_flag, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_choices_are_taken_in_any_case(name: str) -> None:
    before: list[str] = []
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument":
            before.append((parameter.metavar or "x").partition("|")[0])
        elif parameter.required:
            before += [parameter.opts[0], "1"]
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument":
            continue
        choices = choices_of(parameter)
        for choice in choices if len(choices) > 1 else []:
            for written in (choice.upper(), choice.lower()):
                words = [*before, parameter.opts[0], written]
                found = COMMANDS[name].make_context(name, words).params[parameter.name]
                assert found == choice
        if len(choices) > 1:
            result = invoke(name, *before, parameter.opts[0], "x")
            assert f"'{parameter.opts[0]}'" in result.stderr
            assert ": 'x' is not one of '" in result.stderr


def test_version_of_the_document_is_not_for_people(model: Path) -> None:
    for words in (["doctor"], ["inspect", model]):
        assert "schema" not in invoke(*words).stdout
        assert json.loads(invoke(*words, "--json").stdout)["schema"] == 1


def test_what_was_done_has_its_name(folders: Path, output: Path, tmp_path: Path) -> None:
    merged = invoke("merge", folders, tmp_path / "merged").stdout
    assert merged.startswith("Merged layers 0-1 in ")
    resharded = invoke("reshard", output, tmp_path / "resharded", "--numa=2").stdout
    assert resharded.startswith("Resharded layers 0-1 and non-expert tensors in ")


COMPLETIONS = {
    "ktconv ": ["quantize-cpu", "verify", "doctor"],
    "ktconv quantize-cpu --m": ["--method", "--max-memory"],
    "ktconv quantize-cpu --method i": ["int4", "int8"],
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_completions_of_a_shell(line: str, commands: Commands, tmp_path: Path) -> None:
    """To ask writes nothing."""
    variables = {
        "HOME": str(tmp_path),
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_KTCONV_COMPLETE": "bash_complete",
    }
    ended = commands.run([], variables=variables)
    assert ended.returncode == 0 and ended.stderr == ""
    assert set(COMPLETIONS[line]) <= {line.partition(",")[2] for line in ended.stdout.splitlines()}
    assert list(tmp_path.iterdir()) == []


def test_every_whole_number_has_limits() -> None:
    """So that a mistyped one is an error of the option, and not of whatever it is used for."""
    found = 0
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if not isinstance(parameter.type, IntRange) or parameter.opts == ["--group-size"]:
                continue  # a group size is one of a list
            found += 1
            least, most = parameter.type.min, parameter.type.max
            assert least is not None and most is not None, (name, parameter.opts)
            assert most <= 2**31 - 1
    assert found > 20


@pytest.mark.parametrize(
    ("option", "most"), [("--at-once", 64), ("--numa", 1024), ("--threads", 4096)]
)
@pytest.mark.parametrize("value", ["99999999999999999999", "-1"])
def test_numbers_beyond_their_limits(option: str, most: int, value: str, tmp_path: Path) -> None:
    result = invoke("quantize-cpu", EXAMPLE, tmp_path / "out", f"{option}={value}")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"Invalid value for '{option}': {value} is not in the range " in result.stderr
    assert f"<=x<={most}." in result.stderr


def test_at_once_without_a_list(tmp_path: Path) -> None:
    result = invoke("quantize-cpu", EXAMPLE, tmp_path / "out", "--at-once", 2)
    refused(result, 2, "--at-once belongs to --from-list")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["99999999999999999999", "9999999PB", "8388608TiB"])
def test_sizes_beyond_all_files(value: str, tmp_path: Path) -> None:
    result = invoke("quantize-cpu", EXAMPLE, tmp_path / "out", f"--max-memory={value}")
    said = f"--max-memory '{value}' is larger than any file or memory can be"
    refused(result, 2, said)


@pytest.mark.parametrize(
    "words", [("doctor",), ("merge", "x", "y"), ("quantize-cpu", EXAMPLE, "y")]
)
def test_a_current_directory_that_was_removed(words: tuple[object, ...], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-m", "ktconv", *map(str, words)]
    ended = subprocess.run(
        ["sh", "-c", 'rmdir ../gone; exec "$@"', "-", *command],
        cwd=gone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = "Error: the current directory was removed.\nHint: change to one that exists (cd).\n"
    assert (ended.returncode, ended.stderr) == (3, said)
