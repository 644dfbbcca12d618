"""Commands that wait for a server: what they say, and how the first Ctrl-C ends them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import done, write_model
from helpers.faults import Fault
from helpers.paths import ROOT
from helpers.web_server import WebServer, serving

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.network]

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("waits") / "model", layers=3)


@pytest.fixture
def web(model: Path) -> Iterator[WebServer]:
    with serving(model) as found:
        yield found
        found.released.set()


def started(web: WebServer, tmp_path: Path, fault: Fault) -> subprocess.Popen[str]:
    """A conversion of which every request for weights meets `fault`."""
    words = ["quantize-cpu", web.url, str(tmp_path / "out"), "--numa=1"]
    done(*words[1:], "--dry-run")
    headers, web.number = web.number, 0
    web.fault = lambda number: fault if number >= headers else None
    return subprocess.Popen(
        [sys.executable, "-m", "ktconv", *words, "--progress=json"],
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupted(process: subprocess.Popen[str], event: str) -> list[dict[str, Any]]:
    """Its events, where it gets a SIGINT at the first of this kind."""
    assert process.stderr is not None
    found: list[dict[str, Any]] = []
    for line in process.stderr:
        found.append(json.loads(line))
        if found[-1]["event"] == event:
            break
    else:
        raise AssertionError(found)
    time.sleep(0.3)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    found += [json.loads(line) for line in process.stderr]
    assert process.wait(60) == 130
    assert time.monotonic() - sent < 10  # of minutes
    return found


def test_a_pause_that_a_server_asks_for(web: WebServer, tmp_path: Path) -> None:
    import jsonschema

    fault = Fault(429, {"Retry-After": "250"})
    found = interrupted(started(web, tmp_path, fault), "waiting")
    schema = json.loads((ROOT / "docs/progress.schema.json").read_text())
    for event in found:
        jsonschema.validate(event, schema)
    [wait] = [one for one in found if one["event"] == "waiting"]  # of eight requests
    assert web.url.rstrip("/") in wait["for"] and wait["seconds"] == 250
    assert wait["why"] == "it answered 429, and asked for this pause; then comes try 2 of 8"
    assert found[-1]["event"] == "failed" and found[-1]["exit_code"] == 130


def test_a_server_that_never_answers(web: WebServer, tmp_path: Path) -> None:
    interrupted(started(web, tmp_path, Fault("silent")), "started")


def test_pauses_that_grow(web: WebServer, tmp_path: Path) -> None:
    found = interrupted(started(web, tmp_path, Fault(503)), "waiting")
    [wait] = [one for one in found if one["event"] == "waiting"]
    assert wait["why"].startswith("it answered 503; then comes try ")
    assert 2 <= wait["seconds"] <= 40


def test_a_wait_in_words(web: WebServer, tmp_path: Path) -> None:
    process = started(web, tmp_path, Fault(429, {"Retry-After": "250"}))
    process.send_signal(signal.SIGINT)  # the events of this one are not asked for
    process.communicate()
    process = subprocess.Popen(
        [*process.args[:-1], "--progress=lines"],  # type: ignore[index]
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Waiting "):
            break
    assert line.startswith("Waiting 250 s for http://") and line.endswith("try 2 of 8.\n")
    process.send_signal(signal.SIGINT)
    assert "Interrupted. " in process.stderr.read() and process.wait(60) == 130
