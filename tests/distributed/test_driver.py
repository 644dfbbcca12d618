"""`run_jobs` and what a node does, without Ray: a scheduler of this process plays the cluster."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import refused, run, write_model
from msgspec.structs import replace

from ktconv.distributed import cluster, jobs, requests
from ktconv.distributed.cluster import Node
from ktconv.distributed.driver import JobsFailedError, Listener, Scheduler, raise_failures, run_jobs
from ktconv.distributed.jobs import Cancelled, Failure, Job, Message, Reporter, failed, perform
from ktconv.errors import CheckpointError, DiskFullError, VerificationError
from ktconv.quantize.packed.run import Request
from ktconv.source import ModelSource
from ktconv.system import waiting
from ktconv.targets.packed.target import Options
from ktconv.writer.journal import Record

pytestmark = pytest.mark.slow


class Played(Scheduler):
    """Answers each attempt at a job with the next of its scripts; keeps all calls."""

    def __init__(self, scripts: dict[str, list[list[Message]]], room: int = 2) -> None:
        self._scripts, self._room = scripts, room
        self._queues: dict[int, list[Message]] = {}
        self.submitted: list[tuple[str, frozenset[str], str]] = []
        self.cancelled: list[Hashable] = []
        self.most = 0

    def submit(self, job: Job, avoid: frozenset[str]) -> Hashable:
        handle = len(self.submitted)
        self.submitted.append((job.key, avoid, job.arguments["attempt"]))
        self._queues[handle] = list(self._scripts[job.key].pop(0))
        return handle

    def wait(
        self, handles: Sequence[Hashable], seconds: float
    ) -> Iterable[tuple[Hashable, Message]]:
        self.most = max(self.most, len(handles))
        for handle in handles:
            yield handle, self._queues[int(str(handle))].pop(0)

    def cancel(self, handles: Sequence[Hashable]) -> None:
        self.cancelled += handles

    def capacity(self, job: Job) -> int:
        return self._room


class Heard(Listener):
    """Records what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.refuse: list[Failure] = []

    def started(self, job: Job, attempt: str, node: str) -> None:
        self.events.append(("started", job.key, node))

    def advanced(self, job: Job, nbytes: int) -> None:
        self.events.append(("advanced", job.key, nbytes))

    def piece(self, job: Job, attempt: str, file: str, offset: int, data: bytes) -> None:
        self.events.append(("piece", file, offset, data))

    def done(self, job: Job, attempt: str, result: Record) -> Failure | None:
        if self.refuse:
            return self.refuse.pop()
        self.events.append(("done", job.key, result))
        return None

    def abandoned(self, job: Job, attempt: str) -> None:
        self.events.append(("abandoned", job.key))

    def of(self, event: str) -> list[tuple[Any, ...]]:
        return [one for one in self.events if one[0] == event]


def started(node: str = "a") -> Message:
    return {"event": "started", "node": node, "node_id": f"id-{node}"}


def advanced(nbytes: int) -> Message:
    return {"event": "advanced", "nbytes": nbytes}


def done(**result: Any) -> Message:
    return {"event": "done", "result": result}


LOST: Message = {
    "event": "failed", "message": "its node died", "hint": None, "exit_code": 3, "mendable": True
}  # fmt: skip
BROKEN: Message = {
    "event": "failed", "message": "X is damaged", "hint": "restore X.", "exit_code": 2,
    "mendable": False,
}  # fmt: skip


def test_what_a_node_loses_runs_again_elsewhere() -> None:
    """With a name of its own; bytes that were counted are not counted twice."""
    scheduler = Played({"one": [
        [started("a"), advanced(5), advanced(3), LOST],
        [started("b"), advanced(6), LOST],
        [started("c"), advanced(7), advanced(4), done(number=1)],
    ]})  # fmt: skip
    heard = Heard()
    assert run_jobs([Job("one", "look", {})], scheduler, heard) == []
    assert [avoid for _, avoid, _ in scheduler.submitted] == [
        set(), {"id-a"}, {"id-a", "id-b"}
    ]  # fmt: skip
    assert len({attempt for _, _, attempt in scheduler.submitted}) == 3
    assert [nbytes for _, _, nbytes in heard.of("advanced")] == [5, 3, 3]
    assert len(heard.of("abandoned")) == 2 and heard.of("done") == [("done", "one", {"number": 1})]


def test_a_job_that_always_fails_ends_after_some_attempts() -> None:
    scheduler = Played({"one": [[started(), LOST] for _ in range(9)], "two": [[done()]]})
    heard = Heard()
    (failure,) = run_jobs([Job("one", "look", {}), Job("two", "look", {})], scheduler, heard, 3)
    assert failure == Failure("one", "its node died", None, "a", 3, True)
    assert len(scheduler.submitted) == 4 and len(heard.of("done")) == 1


def test_what_no_node_can_mend_fails_at_once_and_the_others_finish() -> None:
    keys = [f"unit-{number}" for number in range(5)]
    scripts = {key: [[started(), BROKEN if key == "unit-1" else done()]] for key in keys}
    heard = Heard()
    failures = run_jobs([Job(key, "look", {}) for key in keys], Played(scripts), heard)
    assert [failure.key for failure in failures] == ["unit-1"] and len(heard.of("done")) == 4
    with pytest.raises(JobsFailedError) as got:
        raise_failures(failures, 5)
    assert str(got.value) == "1 of 5 units failed: unit-1 on a: X is damaged"
    assert got.value.hint == "restore X; run the same command again: finished units are kept"
    assert got.value.exit_code == 2


def test_many_failures_are_named() -> None:
    failures = [Failure(f"unit-{n}", "why", exit_code=2 + n % 2) for n in range(8)]
    with pytest.raises(JobsFailedError) as got:
        raise_failures(failures[::-1], 9)
    assert str(got.value) == (
        "8 of 9 units failed: unit-0: why; also unit-1, unit-2, unit-3, unit-4, unit-5 and 2 more"
    )
    assert got.value.exit_code == 3
    raise_failures([], 9)


def test_a_job_of_one_node_is_not_tried_elsewhere() -> None:
    scheduler = Played({"one": [[started(), LOST]]})
    assert len(run_jobs([Job("one", "look", {}, node="id-a")], scheduler, Heard())) == 1


def test_a_result_that_cannot_be_used_runs_again() -> None:
    heard = Heard()
    heard.refuse = [Failure("one", "its files changed", mendable=True)]
    scheduler = Played({"one": [[started("a"), done()], [started("b"), done()]]})
    assert run_jobs([Job("one", "look", {})], scheduler, heard) == []
    assert len(heard.of("done")) == len(heard.of("abandoned")) == 1


def test_an_error_of_the_driver_cancels_all() -> None:
    class Full(Heard):
        def done(self, job: Job, attempt: str, result: Record) -> Failure | None:
            raise DiskFullError("the disk of the driver is full")

    heard = Full()
    scheduler = Played({"one": [[done()]], "two": [[started(), started()]]})
    with pytest.raises(DiskFullError):
        run_jobs([Job("one", "look", {}), Job("two", "look", {})], scheduler, heard)
    assert scheduler.cancelled == [0, 1] and len(heard.of("abandoned")) == 2


def test_the_scheduler_gets_some_jobs_at_a_time() -> None:
    scripts = {f"unit-{number}": [[done()]] for number in range(300)}
    scheduler = Played(scripts)
    assert run_jobs([Job(key, "look", {}) for key in list(scripts)], scheduler, Heard()) == []
    assert scheduler.most == 64


# ---- on a node -------------------------------------------------------------------------


def test_a_node_reports_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(arguments: Record, reporter: Reporter) -> Record:
        reporter.advanced(3)
        for offset in range(0, 40, 4):
            reporter.piece("file", offset, b"data")
        return {"twice": 2 * arguments["number"]}

    monkeypatch.setattr(jobs, "work", work, raising=False)
    target = "ktconv.distributed.jobs:work"
    messages = list(perform("one", target, {"number": 2}, jobs.fingerprint()))
    pieces = [message for message in messages if message["event"] == "piece"]
    assert [one["offset"] for one in pieces] == list(range(0, 40, 4))
    assert sum(one["nbytes"] for one in messages if one["event"] == "advanced") in (0, 3)
    assert messages[0]["event"] == "started" and messages[-1] == done(twice=4)
    plain = [{**one, "data": ""} for one in messages]
    assert json.loads(json.dumps(plain)) == plain


def test_a_driver_that_wants_no_more_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the generator is what Ray does."""
    ended = []

    def work(arguments: Record, reporter: Reporter) -> Record:
        try:
            while True:
                reporter.piece("file", 0, b"data")
        except Cancelled:
            ended.append(True)
            raise

    monkeypatch.setattr(jobs, "work", work, raising=False)
    running = perform("one", "ktconv.distributed.jobs:work", {}, jobs.fingerprint())
    assert [next(iter(running))["event"] for _ in range(3)] == ["started", "piece", "piece"]
    running.close()  # type: ignore[attr-defined]
    assert ended == [True]


def test_a_node_says_what_it_waits_for_and_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(arguments: Record, reporter: Reporter) -> Record:
        waiting.tell(waiting.Wait("a server", "it is busy", 250))
        waiting.sleep(250)
        return {}

    monkeypatch.setattr(jobs, "work", work, raising=False)
    running = perform("one", "ktconv.distributed.jobs:work", {}, jobs.fingerprint())
    begun, said = (next(iter(running)) for _ in range(2))
    assert begun["event"] == "started"
    assert said == {"event": "noted", "text": "Waiting 250 s for a server: it is busy."}
    before = time.monotonic()
    running.close()  # type: ignore[attr-defined]
    assert time.monotonic() - before < 20


def test_what_nodes_wait_for_is_passed_on() -> None:
    noted: list[str] = []
    heard: Any = Heard()
    heard.noted = noted.append
    wait: Message = {"event": "noted", "text": "Waiting 250 s for a server: it is busy."}
    scheduler = Played({"one": [[started("a"), wait, done(number=1)]]})
    assert run_jobs([Job("one", "look", {})], scheduler, heard) == []
    assert noted == ["one on a: Waiting 250 s for a server: it is busy."]


def test_other_code_is_refused() -> None:
    *_, last = perform("one", "ktconv.distributed.units:look", {}, "0.0 (123)")
    assert last["event"] == "failed" and "the driver 0.0 (123)" in last["message"]
    assert not last["mendable"]


@pytest.mark.parametrize(("error", "message", "mendable", "code"), [
    (CheckpointError("tensor X is damaged"), "tensor X is damaged", False, 2),
    (VerificationError("X differs"), "X differs", True, 1),
    (DiskFullError("DIR is full"), "DIR is full", True, 3),
    (MemoryError(), "out of memory", True, 3),
    (OSError(5, "Input/output error", "file"), "reported an error file: Input/output", True, 3),
    (ValueError("odd"), "internal error: ValueError: odd", False, 1),
])  # fmt: skip
def test_errors_in_messages(error: Exception, message: str, mendable: bool, code: int) -> None:
    found = failed(error)
    assert message in found["message"]
    assert (found["mendable"], found["exit_code"]) == (mendable, code)


def test_a_request_comes_back_as_it_was(tmp_path: Path) -> None:
    source = ModelSource(str(tmp_path), config=Path("of_config"), tower="talker", cache=tmp_path)
    request = Request(
        source, Path("output"), Options(method="int8", numa=3, fold="up-down"),
        layers=(1, 2), threads=3, importance="weights", calibrate=Path("moments"),
    )  # fmt: skip
    record = json.loads(json.dumps(requests.request_record(request)))
    found = requests.request_of(record, Request, Options)
    assert found.options == request.options
    assert found.source == replace(source, config=Path("of_config").absolute(), cache=None)
    assert pickle.loads(pickle.dumps(request)) == request
    assert found.output == Path("output").absolute()
    assert (found.importance, found.calibrate) == ("weights", Path("moments").absolute())
    assert found.layers == [1, 2]


def test_room_on_a_node() -> None:
    node = Node({
        "NodeID": "x", "NodeManagerHostname": "host", "NodeManagerAddress": "10.0.0.1",
        "Resources": {"CPU": 8.0, "memory": 100.0, "disk": 1.0},
    })  # fmt: skip
    assert node.name == "host (10.0.0.1)"
    assert node.fits(Job("one", "look", {}, cpus=3)) == 2
    assert node.fits(Job("one", "look", {}, cpus=3, memory=60)) == 1
    assert node.fits(Job("one", "look", {}, cpus=9)) == 0
    assert node.fits(Job("one", "look", {}, cpus=1, resources={"disk": 0.5})) == 2
    assert node.fits(Job("one", "look", {}, resources={"GPU": 1})) == 0


# ---- bad input, found before Ray is asked ----------------------------------------------


@pytest.mark.parametrize(("options", "code", "words"), [
    (("--ray=127.0.0.1:1",), 3, "no Ray cluster answers at 127.0.0.1:1: Connection refused"),
    (("--ray", "127.0.0.1:1"), 3, "no Ray cluster answers at 127.0.0.1:1"),
    (("--ray=127.0.0.1:70000",), 2, "--ray 127.0.0.1:70000 is no HOST:PORT"),
    (("--ray=somewhere",), 2, "--ray somewhere is no HOST:PORT"),
    (("--ray=ray://head:10001",), 2, "is the address of a Ray client"),
    (("--ray-scratch=scratch",), 2, "--ray-scratch belongs to --ray"),
    (("--ray", "--cache-dir=cache"), 2, "--cache-dir"),
])  # fmt: skip
def test_bad_options(tmp_path: Path, options: tuple[str, ...], code: int, words: str) -> None:
    pytest.importorskip("ray")
    model = write_model(tmp_path / "model", layers=1, experts=1)
    refused(run(model, tmp_path / "output", *options), code, words)
    assert not (tmp_path / "output").exists()


def test_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda _: None)
    result = run(write_model(tmp_path / "model", layers=1), tmp_path / "output", "--ray")
    refused(result, 2, "--ray needs ray, which is not installed")
    assert "pip install 'ktconv[ray]'" in result.stderr
