"""`--progress json`: each line fits its schema, and the last one has the exit code."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.cli import ktconv
from helpers.paths import EXAMPLE, ROOT

from ktconv.cli import options
from ktconv.cli.events import Events, shown_as
from ktconv.cli.events import events as shown_events
from ktconv.cli.options import progress_mode
from ktconv.cli.progress import EventObserver
from ktconv.quantize.packed import run as quantize_cpu_run

pytestmark = pytest.mark.slow

SCHEMA = json.loads((ROOT / "docs/progress.schema.json").read_text())


def events_of(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        jsonschema.validate(one, SCHEMA)
    assert [one["event"] in ("finished", "failed") for one in found] == [False] * (
        len(found) - 1
    ) + [True]
    return found


def quantize(output: Path, *more: str) -> Any:
    return ktconv("quantize-cpu", EXAMPLE, output, "--numa=1", "--progress=json", *more)


def test_a_conversion(tmp_path: Path) -> None:
    result = quantize(tmp_path / "out", "--json")
    found = events_of(result.stderr)
    report = json.loads(result.stdout)
    started = next(one for one in found if one["event"] == "started")
    finished = [one for one in found if one["event"] == "unit_finished"]
    assert started["bytes"] == report["source_bytes_read"] == finished[-1]["done_bytes"]
    assert sorted(one["unit"] for one in finished) == started["units"]  # in any order
    assert sorted(report["converted_units"]) == started["units"]
    assert found[-1] == {"schema": 1, "event": "finished", "exit_code": 0}


@pytest.mark.parametrize("command", ["merge", "reshard", "verify"])
def test_other_commands(command: str, tmp_path: Path) -> None:
    layout = "layers" if command == "merge" else "safetensors"
    quantize(tmp_path / "out", "--layout", layout)
    words = [] if command == "verify" else [tmp_path / "new"]
    parts = ["--numa=2"] if command == "reshard" else []
    result = ktconv(command, tmp_path / "out", *words, *parts, "--progress", "json")
    found = events_of(result.stderr)
    assert {"started", "unit_finished"} <= {one["event"] for one in found}
    assert found[-1] == {"schema": 1, "event": "finished", "exit_code": 0}


def test_a_failed_check_has_its_exit_code(tmp_path: Path) -> None:
    quantize(tmp_path / "out")
    shard = next((tmp_path / "out").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    result = ktconv("verify", tmp_path / "out", "--progress", "json")
    assert events_of(result.stderr)[-1]["exit_code"] == result.exit_code != 0


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere", "out"],
        ["nowhere"],  # OUTPUT is missing
        ["", "out"],
        ["nowhere", "out", "--threads", "many"],
        ["nowhere", "out", "--unknown"],
        ["nowhere", "out", "--max-memory", "much"],
    ],
)
def test_errors_are_events(words: list[str]) -> None:
    result = ktconv("quantize-cpu", "--progress", "json", "--json", *words)
    last = events_of(result.stderr)[-1]
    assert last["event"] == "failed" and last["exit_code"] == result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["message"], error["hint"]) == (last["message"], last["hint"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(5, "I/O error")])
def test_ends_of_other_kinds(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(quantize_cpu_run, "quantize_cpu", fails)
    result = quantize(tmp_path / "out")
    last = events_of(result.stderr)[-1]
    assert last["event"] == "failed" and last["exit_code"] == result.exit_code
    assert result.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 3)


def test_none_and_lines(tmp_path: Path) -> None:
    words = ("quantize-cpu", EXAMPLE)
    quiet = ktconv(*words, tmp_path / "a", "--progress", "none")
    lines = ktconv(*words, tmp_path / "b", "--progress", "lines")
    assert " done, " in lines.stderr and " done, " not in quiet.stderr
    assert quiet.exit_code == lines.exit_code == 0


def test_a_bar_needs_a_terminal(tmp_path: Path) -> None:
    result = ktconv("quantize-cpu", EXAMPLE, tmp_path / "out", "--progress", "bar")
    assert result.exit_code == 2 and "use --progress lines" in result.stderr


def test_progress_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, text = [100.0], io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    observer = EventObserver({"a": 1000}, Events(), lambda: now[0])
    for _ in range(40):
        now[0] += 0.25
        observer.advanced(25)
    events = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [one["event"] for one in events] == ["started"] + ["progress"] * 10
    assert [one["done_bytes"] for one in events[1:]] == list(range(100, 1001, 100))


def test_what_libraries_print_becomes_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, and of a bar its last state; nothing after the end."""
    with shown_as("json"):
        events = shown_events()
        assert events is not None
        print("a warn", end="", file=sys.stderr)
        print("ing\n\nanother", file=sys.stderr)
        for share in (10, 50, 100):
            sys.stderr.write(f"\rsent {share} %")
        sys.stderr.write("\n")
        events.emit("finished", exit_code=0)
        print("too late", file=sys.stderr)
    print("not an event", file=sys.stderr)
    *found, last = capsys.readouterr().err.splitlines()
    assert [one.get("text") for one in events_of("\n".join(found))] == [
        "a warning",
        "another",
        "sent 100 %",
        None,
    ]
    assert last == "not an event"


def test_bars_that_the_user_does_not_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_has_room_for_a_bar", lambda: True)
    assert progress_mode() == "bar"
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    assert progress_mode() == "lines"
    with shown_as("bar"):
        assert progress_mode() == "bar"
