"""Words that many messages share, and messages that were wrong."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.cli import ktconv, refused, run, write_model
from helpers.faults import Fault
from helpers.paths import EXAMPLE
from helpers.web_server import serving
from rich.console import Console

from ktconv.cli.bar import FleetBar
from ktconv.cli.fleet import _line
from ktconv.cli.output import folded
from ktconv.distributed.cluster import _refused
from ktconv.source.gguf import file as gguf_file
from ktconv.system.units import counted, format_rate, listed


@pytest.mark.parametrize(
    ("count", "word", "said"),
    [
        (1, "NUMA part", "1 NUMA part"),
        (2, "NUMA part", "2 NUMA parts"),
        (0, "file", "0 files"),
        (12345, "expert matrix", "12,345 expert matrices"),
        (1, "retry", "1 retry"),
        (3, "retry", "3 retries"),
        (2, "array", "2 arrays"),
    ],
)
def test_counts(count: int, word: str, said: str) -> None:
    assert counted(count, word) == said


def test_numbers_of_things() -> None:
    assert listed("layer", [3]) == "layer 3"
    assert listed("MTP layer", {7, 0, 1, 2}) == "MTP layers 0-2,7"


def test_rates() -> None:
    assert [format_rate(rate) for rate in (0, 4_200, 3.7e6, 1.25e9)] == [
        "0 B/s", "4.2 kB/s", "3.7 MB/s", "1.2 GB/s",
    ]  # fmt: skip
    text = run(EXAMPLE, "/nowhere/at/all", "--dry-run").stdout
    assert "part(s)" not in text


def test_lines_on_narrow_terminals_break_between_words() -> None:
    line = "files copied  config.json, generation_config.json, tokenizer.json, vocab.json"
    wrapped = folded(line, 60)
    assert all(len(one) <= 60 for one in wrapped) and len(wrapped) == 2
    assert wrapped[1].startswith(" " * 14) and "".join(wrapped).count("json") == 4
    assert folded(line, 200) == [line] and folded("", 60) == [""]
    path = "x" * 100
    assert folded(f"output  {path}", 60) == ["output", f"        {path}"]
    row = "line  model                 output     time  state: " + "words " * 10
    assert folded(row, 60)[0].startswith("line  model      ")
    command = "Publish it: ktconv push /a/long/name/of/an/output USER/output --private --message x"
    assert folded(command, 60) == [command]


def test_a_circle_of_redirects(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with serving(write_model(tmp_path / "model", layers=1)) as web:
        web.fault = lambda _: Fault(302, {"Location": f"{web.url}/config.json"})
        result = run(web.url, tmp_path / "out")
        said = refused(result, 2, "from one address to the next without end")
        assert web.url.rstrip("/") in said and "answered 0" not in said


def test_parts_without_a_range(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with serving(write_model(tmp_path / "model", layers=1)) as web:
        web.fault = lambda _: Fault("bare")
        refused(run(web.url, tmp_path / "out"), 2, "the server sends parts without Content-Range")


@pytest.mark.parametrize(
    ("number", "said"), [(137, "one of ik_llama.cpp's own"), (2147483648, "the unknown type")]
)
def test_types_of_gguf(number: int, said: str) -> None:
    with pytest.raises(gguf_file._FaultError, match=said):
        gguf_file._unsupported(number)


def test_a_recipe_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('method = "int4"\nrulee = 3\n[[rule]]\nlayrs = "0"\n')
    said = ktconv("quantize-cpu", EXAMPLE, tmp_path / "out", "--recipe", path).stderr
    assert "r.toml: " in said and "  " not in said.splitlines()[0]


def test_a_model_of_a_list_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(f"/nowhere/at/all {tmp_path}/out\n")
    said = ktconv("quantize-cpu", "--from-list", path).stderr
    assert "Hint: check the path, or give org/name or a URL." in said


@pytest.mark.parametrize(
    "words",
    ["merge URL OUT", "reshard URL OUT --numa=2", "verify URL", "compare URL OUT --source=x"],
)
def test_a_url_where_a_directory_belongs(words: str, tmp_path: Path) -> None:
    given = words.replace("URL", "s3://bucket/out").replace("OUT", str(tmp_path / "out"))
    said = refused(ktconv(*given.split()), 2)
    assert said == "Error: s3://bucket/out is a URL, not a directory on this machine."


def test_a_ray_that_does_not_start() -> None:
    found = _refused("local", TimeoutError("the node timed out"))
    assert "could be started on this machine: the node timed out" in str(found)
    assert "busy" in str(found.hint) and "versions" not in str(found.hint)
    assert "versions" in str(_refused("head:6379", TimeoutError("timed out")).hint)


def _run(line: int, **more: Any) -> Any:
    entry = SimpleNamespace(line=line, output=Path(f"out-{line}"))
    facts = {"finished": 1, "units": 2, "seconds": 3.0, "exit_code": None, "hint": None}
    return SimpleNamespace(entry=entry, **{**facts, **more})


def test_an_interrupt_of_a_list_says_once_what_is_kept() -> None:
    stopped = _run(1, exit_code=130, hint="Nothing was written.", words="failed: interrupted")
    assert _line(stopped, {"event": "run_finished"}, 2, units=True) == (
        "out-1 (line 1): interrupted, 0:03."
    )


def test_the_bar_of_a_list() -> None:
    text = io.StringIO()
    bar = FleetBar(3)
    bar._bar.live.console = Console(file=text, force_terminal=True, width=120)
    first, second = _run(1, state="done"), _run(2, state="failed")
    with bar:
        bar.changed(first, {"event": "started", "bytes": 600, "units": []})
        bar.changed(second, {"event": "started", "bytes": 400, "units": []})
        bar.changed(first, {"event": "progress", "done_bytes": 300, "total_bytes": 600})
        assert (bar.done, bar.total) == (300, 1000)
        bar.changed(first, {"event": "run_finished"})
        assert (bar.done, bar.total) == (600, 1000)
        bar.changed(second, {"event": "progress", "done_bytes": 100, "total_bytes": 400})
        bar.changed(second, {"event": "run_finished"})
        assert (bar.done, bar.total) == (700, 700)
        bar._bar.refresh()
    assert "2 of 3 models ended" in text.getvalue()
    assert _line(first, {"event": "unit_finished"}, 3, units=False) is None
