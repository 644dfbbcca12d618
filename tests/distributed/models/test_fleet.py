"""--from-list: what lists can be, and what becomes of runs of which some fail."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import contents, ktconv, refused, write_model
from helpers.paths import EXAMPLE, ROOT

from ktconv.distributed.models.listing import Entry, read_list
from ktconv.distributed.models.runs import Fleet
from ktconv.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.process]


def listed(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "models.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(path: Path, *more: object) -> tuple[int, list[dict[str, object]], str]:
    result = ktconv("quantize-cpu", "--from-list", path, "--json", *more)
    return result.exit_code, json.loads(result.stdout)["runs"], result.stderr


def test_runs_of_which_one_fails(tmp_path: Path) -> None:
    """The others finish, with options of all and of their own, and the same bytes as alone."""
    broken = write_model(tmp_path / "broken model", layers=1)
    next(broken.glob("*.safetensors")).write_bytes(b"x")
    path = listed(
        tmp_path,
        "# models",
        "",
        f"{EXAMPLE} {tmp_path}/a",
        f"{shlex.quote(str(broken))} {tmp_path}/b --method int8",
        f"{EXAMPLE} {tmp_path}/c --method int8  # in eight bits",
    )
    code, runs, said = run(path, "--numa=2", "--method", "int4", "--at-once=2")
    assert code == 2 and [one["state"] for one in runs] == ["done", "failed", "done"]
    assert [one["line"] for one in runs] == [3, 4, 5]
    assert "broken model" in str(runs[1]["message"]) and runs[1]["report"] is None
    assert "line 4): failed: " in said and "line 3): done, " in said
    for name, method in (("a", "int4"), ("c", "int8")):
        ktconv("quantize-cpu", EXAMPLE, tmp_path / f"{name}-alone", "--numa=2", "--method", method)
        assert contents(tmp_path / name) == contents(tmp_path / f"{name}-alone")
    code, runs, _ = run(path, "--numa=2", "--method", "int4")
    assert code == 2 and runs[0]["report"]["converted_units"] == []  # type: ignore[index]


def test_the_table(tmp_path: Path) -> None:
    path = listed(tmp_path, f"{EXAMPLE} {tmp_path}/a --numa 1", f"no/such {tmp_path}/b")
    result = ktconv("quantize-cpu", "--from-list", path)
    header, first, second, end = result.stdout.splitlines()
    assert header.split() == ["line", "model", "output", "time", "state"]
    assert first.endswith("done") and "failed: no/such is neither a directory" in second
    assert end == "1 of 2 done." and result.exit_code == 2
    assert "2/3 units, " in result.stderr


def test_events_of_runs(tmp_path: Path) -> None:
    import jsonschema

    schema = json.loads((ROOT / "docs/progress.schema.json").read_text())
    path = listed(tmp_path, f"{EXAMPLE} {tmp_path}/a", f"{EXAMPLE} {tmp_path}/b --numa 64")
    result = ktconv("quantize-cpu", "--from-list", path, "--progress", "json")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    for event in events:
        jsonschema.validate(event, schema)
    assert events[-1] == {"schema": 1, "event": "finished", "exit_code": 2}
    ends = [one for one in events if one["event"] == "run_finished"]
    assert [(one["run"], one["exit_code"]) for one in ends] == [(1, 0), (2, 2)]
    assert {one.get("run") for one in events if one["event"] == "unit_finished"} == {1}


def test_plans_of_runs(tmp_path: Path) -> None:
    path = listed(tmp_path, f"{EXAMPLE} {tmp_path}/a --numa 1")
    result = ktconv("quantize-cpu", "--from-list", path, "--dry-run")
    assert result.exit_code == 0 and not (tmp_path / "a").exists()
    assert "planned: 3.7 MB of source, " in result.stdout.splitlines()[1]


@pytest.mark.parametrize("more", [(), ("--json", "--progress=json")])
def test_secrets_of_urls_are_not_shown(
    tmp_path: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they in the arguments of a process, which everybody on the machine sees."""
    started: list[str] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, command: list[str], **more: Any) -> None:
            started.extend(command)
            super().__init__(command, **more)

    monkeypatch.setattr("ktconv.system.children.subprocess.Popen", Recorded)
    url = "http://user:hunter2@127.0.0.1:9/model/?sig=verysecret"
    path = listed(tmp_path, f"{url} {tmp_path}/a")
    result = ktconv("quantize-cpu", "--from-list", path, *more)
    said = result.stdout + result.stderr
    assert result.exit_code == 3 and "http://127.0.0.1:9/model/" in said
    assert started
    for words in (said, " ".join(started)):
        assert "verysecret" not in words and "hunter2" not in words


def test_an_error_is_not_replaced_by_what_a_library_says_after_it() -> None:
    fleet = Fleet([Entry(1, "model", Path("output"), ())], [], 1, lambda run, event: None)
    (run,) = fleet.runs
    fleet._event(run, json.dumps({"event": "failed", "message": "full", "hint": "free some"}))
    fleet._event(run, "a library ends\n")
    fleet._end(run, 3, "")
    assert (run.words, run.hint) == ("failed: full", "free some")


WRONG = {
    "only-one-word": "line 1 of {path}: it does not begin with MODEL and OUTPUT",
    "--numa 2 model out": "line 1 of {path}: it does not begin with MODEL and OUTPUT",
    "{model} out 'without end": "line 1 of {path}: No closing quotation",
    "{model} out --no-such-option": "line 1 of {path}: No such option",
    "{model} out --numa many": "line 1 of {path}: Invalid value for '--numa'",
    "{model} out another": "line 1 of {path}: Got unexpected extra argument",
    "{model} out --layers ''": "line 1 of {path}: an argument is empty",
    "{model} out --json": "line 1 of {path}: --json cannot be given for one model",
    "{model} out --from-list=x": "cannot be given for one model",
    "/nowhere/at/all out": "line 1 of {path}: /nowhere/at/all does not exist",
    "{model} out\n{model} ./out": "line 2 of {path}: line 1 has the same OUTPUT out",
    "{model} out\n{model} out/inner": "line 2 of {path}: out/inner is inside of out",
    "{model} {model}/out": "line 1 of {path}: {model}/out is inside of {model}",
    "# nothing\n\n": "{path} names no models",
}


@pytest.mark.parametrize("text", WRONG)
def test_every_line_is_checked_before_work_starts(text: str, tmp_path: Path) -> None:
    good = f"{EXAMPLE} {tmp_path}/good\n"
    path = listed(tmp_path, text.format(model=EXAMPLE) + "\n" + (good if "#" not in text else ""))
    refused(
        ktconv("quantize-cpu", "--from-list", path), 2, WRONG[text].format(path=path, model=EXAMPLE)
    )
    assert not (tmp_path / "good").exists()


def test_other_wrong_words(tmp_path: Path) -> None:
    path = listed(tmp_path, f"{EXAMPLE} {tmp_path}/a")
    said = "--from-list takes models and outputs from its file"
    refused(ktconv("quantize-cpu", EXAMPLE, "--from-list", path), 2, said)
    refused(ktconv("quantize-cpu", "--from-list", tmp_path / "none"), 2, "does not exist")
    refused(ktconv("quantize-cpu", EXAMPLE), 2, "issing argument OUTPUT")
    refused(ktconv("quantize-cpu"), 2, "issing argument MODEL")
    with pytest.raises(UsageError, match="refused"):
        read_list(path, lambda words: "refused")


def test_long_lines_are_refused_at_once(tmp_path: Path) -> None:
    """Splitting them takes time that grows with the square of their length."""
    path = listed(tmp_path, f"{EXAMPLE} {tmp_path}/a", "[" * (4 << 20))
    path.write_text(path.read_text()[: 4 << 20])
    said = "line 2 of " + str(path) + ": it has 4,19"
    refused(ktconv("quantize-cpu", "--from-list", path), 2, said, "the limit is 65,536")


def test_an_interrupt_ends_all_runs_and_keeps_what_is_done(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=24, experts=8, inner=256)
    path = listed(tmp_path, *(f"{model} {tmp_path}/{name} --numa 1" for name in "ab"))
    words = [sys.executable, "-m", "ktconv", "quantize-cpu", "--from-list", str(path)]
    process = subprocess.Popen(
        [*words, "--progress=json", "--threads=1"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if json.loads(line)["event"] == "unit_finished":
            process.send_signal(signal.SIGINT)
            break
    last = [json.loads(line) for line in process.stderr][-1]
    assert process.wait(60) == last["exit_code"] == 130
    assert "run the same command again" in last["hint"]
    units = list((tmp_path / "a" / ".ktconv").rglob("*.json"))
    assert units and not (tmp_path / "b").exists()


def processes_of(session: int) -> list[int]:
    """Processes of a session that run: not those that have ended and wait for their parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def test_runs_end_with_a_killed_driver_and_the_list_goes_on(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=24, experts=8, inner=256)
    path = listed(tmp_path, *(f"{model} {tmp_path}/{name} --numa 1" for name in "ab"))
    words = [sys.executable, "-m", "ktconv", "quantize-cpu", "--from-list", str(path)]
    words += ["--at-once=2", "--threads=1", "--progress=json"]
    driver = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert driver.stderr is not None
    for line in driver.stderr:
        if json.loads(line)["event"] == "unit_finished":
            break
    assert len(processes_of(driver.pid)) == 3
    driver.kill()
    driver.wait()
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert processes_of(driver.pid) == []
    assert (tmp_path / "a" / "ktconv.json").exists() and (tmp_path / "b" / "ktconv.json").exists()
