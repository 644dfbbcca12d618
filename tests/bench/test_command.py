"""`ktconv bench` at the command line: stdout is data, bad input is one sentence and exit 2."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import amx
import numpy as np
import pytest
from bench.reports import SCHEMA, problems
from typer.testing import CliRunner

from ktconv import native
from ktconv.bench import pack_stage
from ktconv.bench.render import FORMATS
from ktconv.cli import BenchFormat, app
from ktconv.moe import METHODS, Experts

SMALL = ("--shape", "128,128,3,2", "--tokens", "1,5", "--iters", "1", "--threads", "1")


def bench(*words: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


@pytest.fixture(autouse=True)
def _quick(quick: None) -> None:
    pass


def test_formats_are_those_of_the_library() -> None:
    assert tuple(form.value for form in BenchFormat) == FORMATS


@pytest.mark.parametrize("form", FORMATS)
def test_stdout_is_data_and_progress_goes_to_stderr(form: str) -> None:
    result = bench(*SMALL, "--method", "int8,mxfp4", "--format", form)
    assert result.exit_code == 0, result.stderr
    assert "packing 3 experts" in result.stderr and "packing" not in result.stdout
    lines = result.stdout.splitlines()
    if form == "json":
        assert problems(json.loads(result.stdout), SCHEMA) == []
    elif form == "jsonl":
        assert len([json.loads(line) for line in lines]) == 4
    elif form == "csv":
        assert len(list(csv.DictReader(lines))) == 4
    else:
        assert sum("mxfp4" in line for line in lines) == 2


def test_all_methods_and_all_levels() -> None:
    levels = [level for level in native.isa_available() if level != "amx"]
    result = bench(*SMALL, "--method", "all", "--isa", ",".join(levels), "--format", "json")
    rows = json.loads(result.stdout)["rows"]
    found = {(row["method"], row["isa"]) for row in rows}
    assert found == {(method, level) for method in METHODS for level in levels}


def test_the_command_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ktconv", "bench", "--seed", "3"])
    machine = json.loads(bench(*SMALL, "--format", "json").stdout)["machine"]
    assert machine["command"] == ["ktconv", "bench", "--seed", "3"]


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda *given: right(*given) ^ 0x8000)
    result = bench(*SMALL, "--method", "int4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: the int4 kernel is wrong: relative error 2 against float32" in result.stderr


def test_comparing_with_an_old_report(tmp_path: Path) -> None:
    old = json.loads(bench(*SMALL, "--format", "json").stdout)
    path = tmp_path / "old.json"
    for factor, code in ((1e6, 0), (1e-6, 1)):
        for row in old["rows"]:
            row["median_us"] *= factor
        path.write_text(json.dumps(old))
        result = bench(*SMALL, "--compare", path, "--format", "json")
        assert result.exit_code == code, result.stderr
        rows = json.loads(result.stdout)["rows"]
        assert [row["regressed"] for row in rows] == [bool(code)] * len(rows)
        assert f"{len(rows) * code} of {len(rows)} rows are more than 10% slower" in result.stderr
        for row in old["rows"]:
            row["median_us"] /= factor


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "roofline.png", tmp_path / "sweep.svg"]
    words = [word for picture in pictures for word in ("--plot", picture)]
    assert bench(*SMALL, *words).exit_code == 0
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in pictures[1].read_bytes()


def test_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_stage, "_WORKING_SET", 1 << 16)
    words = ("--stage", "pack", "--shape", "128,128,3,2", "--isa", "scalar")
    rows = json.loads(bench(*words, "--format", "json").stdout)["rows"]
    sources = ("BF16", "F16", "F32", "F8_E4M3", "BF16 [in, out]")
    assert [(row["method"], row["source"]) for row in rows] == [
        (method, source) for method in ("int4", "int8") for source in sources
    ]
    assert all(row["pack_gb_s"] > 0 and row["memcpy_gb_s"] > 0 for row in rows)
    for form in FORMATS:
        result = bench(*words, "--format", form, "--method", "int8")
        assert result.exit_code == 0 and "F8_E4M3" in result.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--method", "int3"), "there is no method 'int3'"),
        (("--method", ""), None),
        (("--shape", "qwen"), "is neither a preset nor H,I,E,K"),
        (("--shape", "128,128,4,5"), "more experts per token (5) than experts (4)"),
        (("--shape", "96,128,4,2", "--method", "int4"), "int4 cannot hold hidden size 96"),
        (("--shape", "gpt-oss-120b", "--method", "int4"), "int4 cannot hold hidden size 2880"),
        (("--experts", "1"), "--experts 1 is less than"),
        (("--routing", "even"), "--routing 'even' is not known"),
        (("--routing", "trace:nowhere.npz"), "there is no trace file"),
        (("--tokens", "0"), "must be numbers from 1"),
        (("--tokens", "many"), "is not a list of numbers"),
        (("--tokens", ""), "is not a list of numbers"),
        (("--threads", "0"), "must be numbers from 1"),
        (("--threads", "5000"), "must be numbers from 1"),
        (("--isa", "sse"), "--isa 'sse' is not known"),
        (("--iters", "0"), "Invalid value for '--iters'"),
        (("--seconds", "-1"), "Invalid value for '--seconds'"),
        (("--numa", "3"), "cannot be cut into 3 parts"),
        (("--format", "xml"), "'xml' is not one of"),
        (("--plot", "plot.txt"), "is no picture"),
        (("--plot", "nowhere/plot.png"), "there is no directory nowhere"),
        (("--compare", "nowhere.json"), "nowhere.json cannot be read"),
        (("--layer", "0"), "--layer and --top-k belong to --model"),
        (("--model", "nowhere"), "there is no directory nowhere"),
        (("--model", ".", "--method", "int4"), "--model brings its own weights"),
        (("--stage", "pack", "--method", "bf16"), "--stage pack cannot measure bf16"),
        (("--stage", "pack", "--peers"), "--peers does not belong to --stage pack"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input(
    words: tuple[str, ...], error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    base = () if {"--model", "--stage"} & set(words) else SMALL
    result = bench(*base, *words)
    if error is None:
        assert result.exit_code == 0
        return
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr and not list(tmp_path.iterdir())


def test_a_trace_with_ids_out_of_range(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", ids=np.array([[0, 1], [3, 2]]))
    result = bench(*SMALL, "--routing", f"trace:{tmp_path / 'trace.npz'}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "sends token 1 to expert 3, but there are 3" in result.stderr


def test_a_level_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "isa_available", lambda: ["scalar"])
    result = bench(*SMALL, "--isa", "amx")
    assert result.exit_code == 2 and "this machine lacks amx" in result.stderr


def test_amx_under_the_emulator(emulator: amx.Emulator, tmp_path: Path) -> None:
    """The command itself, in a process of its own, on tiles."""
    words = ["bench", "--isa", "amx", "--tokens", "33", "--iters", "1", "--shape", "256,256,4,2"]
    result = subprocess.run(
        [sys.executable, "-m", "ktconv", *words, "--method", "int8,bf16", "--format", "json"],
        capture_output=True,
        text=True,
        env=os.environ | emulator.environment(tmp_path / "counts"),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["method"], row["isa"]) for row in rows] == [
        (method, "amx") for method in ("int8", "bf16")
    ]
    counts = amx.read_report(tmp_path / "counts")
    assert counts.int8_products and counts.bf16_products
