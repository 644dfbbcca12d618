"""`bench --mode sft` from the command line to rows, on layers of a few kilobytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from bench.conftest import QuickMeter
from bench.reports import SFT_SCHEMA, problems
from click.testing import CliRunner
from helpers.convert import Converted

from ktconv import native
from ktconv.bench import command
from ktconv.bench.cases import Request as LayersRequest
from ktconv.bench.measure import Effort
from ktconv.bench.peers import table
from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.table import why_not
from ktconv.bench.presets import Shape
from ktconv.bench.sft import bout
from ktconv.bench.sft import run as sft_run
from ktconv.bench.sft.bout import PeerRunner
from ktconv.bench.sft.peers.request import Request
from ktconv.bench.sft.peers.table import PEERS
from ktconv.bench.sft.peers.worker import work
from ktconv.bench.sft.steps import Times, in_turn
from ktconv.cli.app import app
from ktconv.formats import FORMATS
from ktconv.native import Activation
from ktconv.system import children, machine
from ktconv.train.gradients import MATRICES, NAMES, Found
from ktconv.train.step import Step

pytestmark = [pytest.mark.slow, pytest.mark.torch]

SMALL = ("--shape", "128,128,3,2", "--tokens", "5", "--iters", "1", "--threads", "1")
SHAPE = Shape("small", 256, 256, 6, 2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_run, "Meter", QuickMeter)


def bench(*words: object) -> Any:
    return CliRunner().invoke(app, ["bench", "--mode", "sft", *map(str, words)])


def rows_of(*words: object) -> list[dict[str, Any]]:
    done = bench(*words, "--format", "json")
    report = json.loads(done.stdout)
    assert problems(report, SFT_SCHEMA) == []
    rows: list[dict[str, Any]] = report["rows"]
    return rows


# ---- ours ----


def test_rows_of_all_that_was_asked_for() -> None:
    levels = native.kernel_levels(*(one.layout for one in FORMATS.values()))
    isas = [level for level in levels if level != "amx"]
    words = ("--method", "bf16,gint4-32", "--tokens", "1,5", "--rank", "3,16", "--isa")
    rows = rows_of(*SMALL, *words, ",".join(isas))
    found = {(row["method"], row["tokens"], row["rank"], row["isa"]) for row in rows}
    methods, tokens, ranks = ("bf16", "gint4-32"), (1, 5), (3, 16)
    assert found == {(m, t, r, i) for m in methods for t in tokens for r in ranks for i in isas}
    assert len(found) == len(rows)
    for row in rows:
        assert row["steps"] == 1 and row["saved_bytes"] > 0 and row["scratch_bytes"] > 0
        assert set(row["errors"]) == set(row["kernel_errors"]) == set(NAMES)
        assert row["beyond_bound"] == []
    of_bf16 = [row for row in rows if row["method"] == "bf16"]
    assert all(row["errors"] == row["kernel_errors"] for row in of_bf16)
    assert of_bf16[0]["saved_bytes"] < of_bf16[-1]["saved_bytes"]


def test_a_converted_model_without_some_experts(converted_example: Converted) -> None:
    output = converted_example(method="int8", numa=2)
    (row,) = rows_of("--model", output, "--layer", "1", *SMALL[2:])
    assert (row["method"], row["parts"], row["layer"]) == ("int8", 2, 1)


def test_experts_without_a_gate_have_no_gradient_of_it() -> None:
    shape = Shape("ungated", 128, 128, 3, 2, Activation("relu2"))
    layers = LayersRequest(
        (FORMATS["bf16"],), (shape,), (2,), (1,), (native.isa(),), effort=Effort(iterations=1)
    )
    (row,) = sft_run.bench(sft_run.Request(layers), lambda line: None).rows
    assert set(row.errors) == set(NAMES) - {"gate_a", "gate_b"} and row.beyond_bound == []


@pytest.mark.parametrize("name", ["dx", "dw", "up_b", "down_a"])
def test_a_wrong_gradient_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Step.found

    def wrong(step: Step) -> Found:
        found = right(step)
        return {**found, name: found[name] * 1.03}

    monkeypatch.setattr(Step, "found", wrong)
    done = bench(*SMALL, "--method", "bf16", "--format", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"][0]["beyond_bound"] == [name]
    assert f": {name} has a relative error of" in done.stderr


def test_a_nan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Step.found
    monkeypatch.setattr(Step, "found", lambda step: right(step) | {"dx": torch.tensor(torch.nan)})
    done = bench(*SMALL, "--method", "bf16", "--format", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"][0]["kernel_errors"]["dx"] == "nan"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plot", "a.png"), "--plot does not belong to --mode sft"),
        (("--compare", "a.json"), "--compare does not belong to --mode sft"),
        (("--tolerance", "0.2"), "--tolerance does not belong to --mode sft"),
        (("--stage", "pack"), "--stage does not belong to --mode sft"),
        (("--rank", "0"), "--rank '0' must be numbers from 1 to 1024"),
        (("--rank", "1025"), "--rank '1025' must be numbers from 1 to 1024"),
        (("--rank", "eight"), "--rank"),
    ],
)
def test_options_that_do_not_fit(words: tuple[str, ...], said: str) -> None:
    done = bench(*words)
    assert done.exit_code == 2 and said in done.stderr and not done.stdout


def test_inference_has_no_rank() -> None:
    done = CliRunner().invoke(app, ["bench", "--rank", "8"])
    assert done.exit_code == 2 and "--rank does not belong to --mode infer" in done.stderr


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    done = bench(*SMALL)
    assert done.exit_code == 2
    assert "torch, which is not installed" in done.stderr and "ktconv[" in done.stderr


def test_too_large_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 28)
    monkeypatch.setattr("ktconv.bench.cases._check_memory", lambda *given: None)
    done = bench("--experts", "16", "--iters", "1", "--threads", "1")
    assert done.exit_code == 2 and "more than this machine has free" in done.stderr


# ---- peers ----


def request(peer: str, **changes: Any) -> Request:
    fields = {"shape": SHAPE, "routing": "balanced", "tokens": 5, "rank": 4, "threads": 1}
    return Request(peer, **{**fields, **changes})


@pytest.mark.parametrize("name", PEERS)
def test_peer_computes_the_step(name: str) -> None:
    if reason := why_not(PEERS[name]):
        pytest.skip(reason)
    runner = PeerRunner(request(name))
    try:
        bound = 0.01 if PEERS[name].method == "bf16" else 0.06
        assert set(runner.ready.errors) == set(NAMES)
        assert all(error < bound for error in runner.ready.errors.values())
        (times,) = in_turn([runner], Effort(iterations=4))
        assert isinstance(times, Times)
        assert len(times.forward) == 4 and min(times.forward + times.backward) > 0
    finally:
        runner.close()


def test_peers_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    done = bench(*SMALL, "--method", "int8", "--peers", "--format", "json")
    report = json.loads(done.stdout)
    assert problems(report, SFT_SCHEMA) == []
    found = {(row["engine"], row["method"]) for row in report["rows"]}
    assert {("ktconv", "int8"), ("torch", "bf16")} <= found
    (row,) = (row for row in report["rows"] if row["engine"] == "torch")
    assert row["isa"] == "own" and row["kernel_errors"] == {} and row["saved_bytes"] > 0
    installed = [spec for spec in PEERS.values() if not why_not(spec)]
    assert len(report["rows"]) == 1 + sum("int8" in spec.methods for spec in installed)


def test_a_peer_without_a_spare_core_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """kt-kernel's queue would take the time of one of its threads; torch has none."""
    kt_kernel = PEERS["kt-kernel int8"]
    monkeypatch.setattr(table, "why_not", lambda spec: None)
    monkeypatch.setattr(bout, "PeerRunner", _refused)
    for cpus, reason in ((1, "1 thread needs 2 CPUs and there are 1; give fewer"), (2, "asked")):
        monkeypatch.setattr(machine, "usable_cpus", lambda cpus=cpus: cpus)
        done = bench(*SMALL, "--method", "int8", "--peers")
        (line,) = (one for one in done.stderr.splitlines() if f"{kt_kernel.name}: left" in one)
        assert reason in line
        assert "torch bf16: left out, asked" in done.stderr


def _refused(asked: Request) -> None:
    raise PeerError("asked")


def test_torch_skips_experts_that_live_elsewhere() -> None:
    from ktconv.bench.sft.inputs import make_inputs
    from ktconv.bench.sft.peers.torch_loop import TorchLoop
    from ktconv.bench.weights import RandomWeights

    source = RandomWeights(1, SHAPE.hidden, SHAPE.intermediate)
    ids = torch.tensor([[4, -1], [1, 4], [-1, -1]])
    inputs = make_inputs(iter([ids.numpy()] * 8), 3, SHAPE, 6, 4, 0)
    loop = TorchLoop([source.expert(e) for e in range(6)], inputs.call)
    loop.forward(inputs.call.ids)
    loop.backward()
    found = loop.found()
    assert not found["y"][2].any() and not found["dx"][2].any() and not found["dw"][2].any()
    assert found["y"][:2].any() and found["dw"][0, 0] != 0 and found["dw"][0, 1] == 0
    for name in MATRICES:
        used = [bool(found[name][expert].any()) for expert in range(6)]
        assert used == [False, True, False, False, True, False], name


def test_refuses_what_it_does_not_compute() -> None:
    odd = Shape("odd", 256, 256, 6, 2, Activation("gelu"))
    with pytest.raises(PeerError, match="SwiGLU"):
        next(work(request("torch bf16", shape=odd), ()))


def test_a_wrong_peer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktconv.bench.sft.peers import torch_loop

    monkeypatch.setattr(torch_loop, "silu", lambda values: values)
    before = torch.get_num_threads()
    try:
        with pytest.raises(PeerError, match="wrong here: relative error"):
            next(work(request("torch bf16"), ()))
    finally:
        torch.set_num_threads(before)


def test_a_crash_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.sh"
    script.write_text(f"#!{sys.executable}\nimport sys; sys.exit('no AVX here')\n")
    script.chmod(0o755)
    monkeypatch.setattr(children, "sys", SimpleNamespace(executable=str(script)))
    with pytest.raises(PeerError, match="status 1: no AVX here"):
        PeerRunner(request("torch bf16"))
    done = bench(*SMALL, "--method", "bf16", "--peers")
    assert done.exit_code == 0 and "torch bf16: left out, its process ended" in done.stderr
