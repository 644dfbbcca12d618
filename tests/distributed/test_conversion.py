"""Conversions on a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gguf_files, ray_jobs
from helpers.cli import contents, done, ktconv, ktconv_done, refused, run
from helpers.families import random_weights
from helpers.lora import sides, write_adapter
from helpers.ray_jobs import gate_of, log_of, request

from ktconv.conversion.pipeline import Observer
from ktconv.distributed.cluster import Cluster
from ktconv.distributed.commands import convert_on
from ktconv.distributed.conversion import Distribution
from ktconv.distributed.driver import JobsFailedError, Listener, run_jobs
from ktconv.distributed.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.process]

LAYERS = 4  # of the model
ALL = ["layer-00000", "layer-00001", "layer-00002", "layer-00003", "other-00001"]


class Watcher(Observer):
    """Records what it is told, and does something when all units but `but` are finished."""

    def __init__(self, then: Any = None, but: int = 0) -> None:
        self.then, self.but = then, but
        self.units: list[str] = []
        self.finished: list[str] = []
        self.notes: list[str] = []
        self.nbytes = 0

    def begin(self, keys: list[str]) -> None:
        self.units = keys

    def advanced(self, source_bytes: int) -> None:
        self.nbytes += source_bytes

    def noted(self, text: str) -> None:
        self.notes.append(text)

    def unit_finished(self, key: str) -> None:
        self.finished.append(key)
        if self.then and len(self.finished) == len(self.units) - self.but:
            self.then()


def ran(output: Path) -> list[list[str]]:
    return [line.split() for line in log_of(output).read_text().splitlines()]


def working(cluster: Cluster) -> list[str]:
    return [node.id for node in cluster.nodes() if node.cpus]


@pytest.mark.parametrize(("options", "scratch"), [
    ((), False), ((), True), (("--layout=layers",), False), (("--layout=layers",), True),
    (("--max-shard-size=40kB",), True),
    (("--fold=up-down", "--importance=weights"), False), (("--save-backward",), True),
])  # fmt: skip
def test_same_bytes(
    cluster: Cluster, model: Path, tmp_path: Path, options: tuple[str, ...], scratch: bool
) -> None:
    more = ("--ray", f"--ray-scratch={tmp_path / 'scratch'}") if scratch else ("--ray",)
    done(model, tmp_path / "here", *options)
    done(model, tmp_path / "there", "--threads=1", *options, *more)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert not scratch or not list((tmp_path / "scratch").iterdir())


def test_progress_is_that_of_all_nodes(
    cluster: Cluster, model: Path, clean: Path, tmp_path: Path
) -> None:
    watcher = Watcher()
    report = convert_on(Distribution(cluster), request(model, tmp_path / "output"), watcher)
    assert sorted(watcher.finished) == sorted(watcher.units) == ALL
    assert watcher.nbytes == report.source_bytes > 0
    assert report.complete and contents(tmp_path / "output") == contents(clean)


def test_runs_continue_each_other(
    cluster: Cluster, model: Path, clean: Path, tmp_path: Path
) -> None:
    ray, without = ("--ray", "--threads=1"), ()
    for number, (first, second) in enumerate([(ray, without), (without, ray)]):
        output = tmp_path / str(number)
        assert "missing layer" in done(model, output, "--layers=1-2", *first)
        stdout = done(model, output, *second)
        assert "Converted layers 0,3 in" in stdout
        assert contents(output) == contents(clean)
        assert "nothing to do" in done(model, output, *ray)


def test_a_slow_node_gets_less_work(
    cluster: Cluster, model: Path, clean: Path, tmp_path: Path
) -> None:
    """One node waits in its first unit until the other one has done all others."""
    slow, fast = working(cluster)
    output = tmp_path / "output"
    gate_of(output).write_text(slow)
    watcher = Watcher(gate_of(output).unlink, but=1)
    convert_on(Distribution(cluster, kind="gated"), request(model, output), watcher)
    nodes = [node for _, node in ran(output)]
    assert nodes.count(slow) == 1 and nodes.count(fast) == len(ALL) - 1
    assert contents(output) == contents(clean)


def test_a_node_that_dies(
    nodes: Any, cluster: Cluster, model: Path, clean: Path, tmp_path: Path
) -> None:
    """Its unit runs again, on another node."""
    from helpers.ray_nodes import added_node

    output = tmp_path / "output"
    with added_node(nodes, cluster) as (added, remove):
        gate_of(output).write_text(added)
        watcher = Watcher(remove, but=1)
        convert_on(Distribution(cluster, kind="gated"), request(model, output), watcher)
    attempts = ran(output)
    lost = [unit for unit, node in attempts if node == added]
    assert len(lost) == 1 and len(attempts) == len(ALL) + 1
    assert watcher.notes == [
        f"{lost[0]} failed on {os.uname().nodename}, runs again: its node died"
    ]
    assert contents(output) == contents(clean)


@pytest.mark.parametrize(("kind", "words", "code"), [
    ("failing", "tensor X of layer 1 is damaged", 2), ("dying", "its process was killed", 3)
])  # fmt: skip
def test_a_unit_that_always_fails(
    cluster: Cluster, model: Path, clean: Path, tmp_path: Path, kind: str, words: str, code: int
) -> None:
    """It is named, the others finish; what another node can mend is tried again."""
    output, watcher = tmp_path / "output", Watcher()
    with pytest.raises(JobsFailedError, match=f"1 of 5 units failed: layer-00001 .*{words}") as got:
        convert_on(Distribution(cluster, kind=kind), request(model, output), watcher)
    assert got.value.exit_code == code
    assert got.value.hint and got.value.hint.endswith("finished units are kept")
    assert sorted(watcher.finished) == [unit for unit in ALL if unit != "layer-00001"]
    again = [note for note in watcher.notes if "runs again" in note]
    assert len(again) == (1 if kind == "failing" else 3)
    assert not list((output / ".ktconv").glob("*.part"))
    assert "Converted layer 1 in" in done(model, output)
    assert contents(output) == contents(clean)


def test_an_interrupt_keeps_what_is_finished(
    cluster: Cluster, model: Path, clean: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    gate_of(output).write_text("layer-00003")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_on(
            Distribution(cluster, kind="gated"), request(model, output), Watcher(interrupt, but=1)
        )
    assert len(list((output / ".ktconv").glob("*-0*.json"))) == len(ALL) - 1
    assert not list((output / ".ktconv").glob("*.part"))
    gate_of(output).unlink()
    assert "Converted layer 3 in" in done(model, output, "--ray", "--threads=1")
    assert contents(output) == contents(clean)


def test_a_driver_that_is_killed(
    nodes: Any, cluster: Cluster, model: Path, clean: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    gate_of(output).write_text("layer-00003")
    command = [sys.executable, ray_jobs.__file__, nodes.address, str(model), str(output)]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while len(list(output.glob(".ktconv/*-0*.json"))) < len(ALL) - 1:
        assert driver.poll() is None, driver.communicate()[1]
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    # What a task can leave that died with its driver.
    (output / ".ktconv/model-00004-of-00005.safetensors.dead-1.part").write_bytes(b"half")
    assert "Converted layer 3 in" in done(model, output, "--ray", "--threads=1")
    assert contents(output) == contents(clean)


# ---- bad input -------------------------------------------------------------------------


def test_what_no_node_can_run(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "output", "--ray", "--threads=64", "--max-memory=64GiB")
    refused(result, 2, "no node of the Ray cluster has 64 CPUs")
    assert "fewer --threads" in result.stderr
    assert not (tmp_path / "output").exists()


def test_a_model_that_changes_between_driver_and_node(
    cluster: Cluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another copy on a node's disk."""
    monkeypatch.setattr("ktconv.distributed.conversion.digest", lambda _: "that of another")
    result = run(model, tmp_path / "output", "--ray", "--threads=1")
    refused(result, 2, os.uname().nodename, "is not what it is on the driver")
    assert "cp -p" in result.stderr
    assert not (tmp_path / "output").exists()


def test_a_scratch_directory_that_cannot_be(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    scratch = f"--ray-scratch={tmp_path / 'file' / 'below'}"
    result = run(model, tmp_path / "output", "--ray", "--threads=1", scratch)
    refused(result, 2, os.uname().nodename, "file")
    assert not (tmp_path / "output").exists()


def test_other_code_on_nodes(
    cluster: Cluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.distributed.cluster.fingerprint", lambda: "9.9 (abc)")
    result = run(model, tmp_path / "output", "--ray", "--threads=1")
    refused(result, 2, "has ktconv", "the driver 9.9 (abc)")
    assert "install the same version" in result.stderr
    assert not (tmp_path / "output").exists()


def test_an_output_that_is_not_shared(
    cluster: Cluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that sees another directory under the same path sees no probe file there."""
    monkeypatch.setattr("ktconv.distributed.conversion.write_durably", lambda *_: None)
    result = run(model, tmp_path / "output", "--ray", "--threads=1")
    refused(result, 2, "is not shared", os.uname().nodename)
    assert "--ray-scratch DIR" in result.stderr
    assert not (tmp_path / "output").exists()


def test_many_jobs(cluster: Cluster) -> None:
    class Results(Listener):
        total = 0

        def done(self, job: Job, attempt: str, result: Any) -> None:
            self.total += result["twice"]

    results = Results()
    jobs = [Job(f"job-{n}", "count", {"number": n}) for n in range(100)]
    assert run_jobs(jobs, cluster, results) == []
    assert results.total == sum(range(0, 200, 2))


def test_calibration_on_a_text_is_refused(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("words")
    result = run(model, tmp_path / "output", "--ray", f"--calibrate={text}")
    refused(result, 2, "--calibrate with a text")
    assert "ktconv stats MODEL --hessian DIR" in result.stderr


def test_experts_for_gpus(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Continued without the cluster, the same files as on one machine."""
    pytest.importorskip("llmcompressor")
    stacked = "--expert-layout=stacked"  # jobs write parts of tensors
    ktconv_done("quantize-gpu", model, tmp_path / "here", stacked)
    there = ("quantize-gpu", model, tmp_path / "there", stacked)
    ktconv_done(*there, "--layers=0-1", "--ray", "--threads=1")
    ktconv_done(*there)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    words = ("quantize-gpu", model, tmp_path / "x", "--method=gptq", "--dataset=x.txt", "--ray")
    refused(ktconv(*words), 2, "--algorithm gptq runs the whole model in one process")


@pytest.mark.parametrize("scratch", [False, True])
def test_gguf_files(cluster: Cluster, model: Path, tmp_path: Path, scratch: bool) -> None:
    """Continued without the cluster, the same files as on one machine; all of a layer in one
    tensor, and other tensors of a file that nodes open themselves."""
    tensors: dict[str, Any] = {"token_embd.weight": np.ones((8, 128), np.float32)}
    for layer in range(LAYERS):
        weights = random_weights(inner=128, experts=2, seed=layer)
        tensors |= gguf_files.experts(layer, weights)
    about = gguf_files.metadata(LAYERS, expert_count=2, expert_feed_forward_length=128)
    beside = gguf_files.write_gguf(tmp_path / "beside.gguf", tensors, about)
    words = ("--method=gguf-q8_0", f"--with={beside}", "--threads=1")
    more = (f"--ray-scratch={tmp_path / 'scratch'}",) if scratch else ()
    ktconv_done("quantize-cpu", model, tmp_path / "here", *words)
    ktconv_done("quantize-cpu", model, tmp_path / "there", "--layers=0-1", *words, "--ray", *more)
    ktconv_done("quantize-cpu", model, tmp_path / "there", *words)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    checked = ("--source", model, "--level=weights", "--threads=1", "--ray")
    ktconv_done("verify", tmp_path / "there", *checked)


def test_with_an_adapter(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Nodes read the adapter themselves."""
    rng = np.random.default_rng(1)
    modules = {
        f"model.layers.2.mlp.experts.{expert}.up_proj": sides(rng, 128, 128) for expert in range(2)
    }
    option = f"--adapter={write_adapter(tmp_path / 'adapter', modules)}:0.5"
    done(model, tmp_path / "here", option)
    done(model, tmp_path / "there", "--threads=1", option, "--ray")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    done(model, tmp_path / "plain")
    assert contents(tmp_path / "plain") != contents(tmp_path / "here")
    ktconv_done("verify", tmp_path / "there", f"--source={model}", "--level=weights", "--ray")
