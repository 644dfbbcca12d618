"""Peers compute the layer that we compute: on the same weights, within their own rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import convert, to_builtins
from msgspec.structs import asdict

import ktconv
from ktconv.bench.measure import Batch, Effort
from ktconv.bench.peers import table as peer_table
from ktconv.bench.peers.base import Layer, PeerError, reference
from ktconv.bench.peers.launch import measure
from ktconv.bench.peers.request import Request, Result
from ktconv.bench.peers.table import PEERS, why_not
from ktconv.bench.peers.worker import work
from ktconv.bench.presets import Shape
from ktconv.bench.weights import RandomWeights
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Activation
from ktconv.system import children

pytestmark = [pytest.mark.slow, pytest.mark.process]

SHAPE = Shape("small", 256, 256, 6, 2)
ONE = Effort(iterations=1)

# int8 and int4: two roundings of activations to 8 bits; bf16 accumulates less exactly than float32.
BOUNDS = {"int8": 0.05, "bf16": 0.01}


def request(peer: str, **changes: object) -> Request:
    fields = {"shape": SHAPE, "routing": "balanced", "tokens": (1, 5), "threads": 1, "effort": ONE}
    return Request(peer, **{**fields, **changes})  # type: ignore[arg-type]


def installed(name: str) -> None:
    if reason := why_not(PEERS[name]):
        pytest.skip(reason)


@pytest.mark.parametrize("name", PEERS)
def test_peer_computes_the_layer(name: str) -> None:
    """And its bytes are those of the format."""
    installed(name)
    results = list(measure(request(name)))
    assert [result.tokens for result in results] == [1, 5]
    bits = {"int4": 4, "q4_0": 4.5, "q4_k": 4.5, "gint4-32": 4.5, "mxfp4": 4.25, "q8_0": 8.5}
    expected = bits.get(name.split()[1], 16 if name.endswith("bf16") else 8)
    measured = 8 * results[0].expert_bytes / (3 * SHAPE.hidden * SHAPE.intermediate)
    assert expected <= measured <= expected + 0.3
    for result in results:
        assert result.relative_error <= BOUNDS[PEERS[name].unit]
        assert result.relative_error <= result.source_error * 1.5
        assert len(result.seconds) == 1 and result.seconds[0] > 0
    assert results[0].pairs == results[0].distinct == SHAPE.top_k
    assert results[1].pairs == 5 * SHAPE.top_k


@pytest.mark.parametrize("name", ["ggml q4_0", "ggml q4_k"])
def test_ggml_repacks(name: str) -> None:
    installed(name)
    (result,) = measure(request(name, tokens=(1,)))
    assert result.detail != "CPU"


def test_torch_skips_experts_that_live_elsewhere() -> None:
    installed("torch bf16")
    peer = PEERS["torch bf16"].make()
    source = RandomWeights(1, SHAPE.hidden, SHAPE.intermediate)
    peer.prepare(Layer(SHAPE, range(SHAPE.experts), source.expert, 1, 3))
    rng = np.random.default_rng(2)
    x = f32_to_bf16(rng.standard_normal((3, SHAPE.hidden), np.float32))
    ids = np.array([[4, -1], [1, 4], [-1, -1]])
    batch = Batch(x, rng.random((3, 2), np.float32), [ids])
    steps = peer.steps(batch)
    steps.calls[0]()
    expected = reference(Activation(), source.expert, batch, [0, 1, 2])
    np.testing.assert_allclose(steps.result(), expected, atol=0.02 * np.abs(expected).max())
    assert not steps.result()[2].any()


def test_reference_is_the_plain_sum() -> None:
    rng = np.random.default_rng(3)
    gate, up, down = (rng.standard_normal(size, np.float32) for size in ((3, 4), (3, 4), (4, 3)))
    batch = Batch(
        f32_to_bf16(rng.standard_normal((1, 4), np.float32)),
        np.array([[0.25, 0.5]], np.float32),
        [np.array([[0, 1]])],
    )
    x = bf16_to_f32(batch.x)[0].astype(np.float64)
    g = gate @ x
    once = down @ (g / (1 + np.exp(-g)) * (up @ x))
    got = reference(Activation(), lambda expert: (gate, up, (1 + expert) * down), batch, [0])
    np.testing.assert_allclose(got[0], 0.25 * once + 0.5 * 2 * once, rtol=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_refuses_what_it_does_not_compute(name: str) -> None:
    installed(name)
    odd = Shape("odd", 256, 256, 6, 2, Activation("gelu"))
    with pytest.raises(PeerError, match="SwiGLU"):
        list(measure(request(name, shape=odd)))


@pytest.mark.parametrize("name", [n for n in PEERS if n.startswith(("kt-kernel", "ggml"))])
def test_refuses_sizes_that_do_not_fit(name: str) -> None:
    installed(name)
    if name == "ggml bf16":
        pytest.skip("bf16 has no blocks in ggml")
    with pytest.raises(PeerError, match="multiples of"):
        list(measure(request(name, shape=Shape("odd", 256, 48, 6, 2))))


@pytest.mark.parametrize("name", ["ggml mxfp4", "ggml bf16"])
def test_ggml_has_the_activation_of_gpt_oss(name: str) -> None:
    installed(name)
    shape = Shape("oss", 256, 256, 6, 2, Activation("swiglu", 1.702, 1.0, 7.0))
    (result,) = measure(request(name, shape=shape, tokens=(4,)))
    assert result.relative_error <= BOUNDS[PEERS[name].unit]


def test_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from ktconv.bench.peers import torch_bf16

    monkeypatch.setattr(torch_bf16, "silu", lambda values: values)
    with pytest.raises(PeerError, match="wrong"):
        list(work(request("torch bf16")))


def test_request_and_result_survive_json() -> None:
    sent = request("torch bf16", shape=Shape("s", 8, 8, 4, 2, Activation(limit=float("inf"))))
    assert convert(json.loads(json.dumps(to_builtins(sent))), Request) == sent
    result = Result(3, [0.5, 0.25], 6.0, 4.0, 99, 0.1, 0.2, "CPU")
    assert Result(**json.loads(json.dumps(asdict(result)))) == result


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A script in place of the peer's process."""
    script = tmp_path / "peer.sh"
    monkeypatch.setattr(children, "sys", SimpleNamespace(executable=str(script)))
    yield script


def test_modules_of_the_working_directory_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who benches in the directory of a checkpoint runs nothing that lies there."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for name in ("json", "numpy", "torch", "signal", "ktconv"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'w').close()\n")
    results = list(measure(request("torch bf16")))
    assert len(results) == len(request("torch bf16").tokens)
    command = [sys.executable, "-m", "ktconv", "--version"]
    assert ktconv.__file__ is not None
    paths = str(Path(ktconv.__file__).parents[1])
    (tmp_path / "ktconv.py").unlink()  # by its own name Python itself would find that
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=False)
    assert done.returncode == 0
    assert not (tmp_path / "planted").exists()


def test_crash_is_told(other_process: Path) -> None:
    other_process.write_text(f"#!{sys.executable}\nimport sys; sys.exit('no AVX here')\n")
    other_process.chmod(0o755)
    with pytest.raises(PeerError, match="status 1: no AVX here"):
        list(measure(request("torch bf16")))


def test_process_ends_with_the_caller(other_process: Path) -> None:
    line = json.dumps(asdict(Result(1, (0.5,), 2.0, 2.0, 99, 0.1, 0.2)))
    other_process.write_text(
        f"#!{sys.executable}\nimport time; print('''{line}''', flush=True); time.sleep(60)\n"
    )
    other_process.chmod(0o755)
    results = measure(request("torch bf16"))
    assert next(results).tokens == 1
    results.close()  # type: ignore[attr-defined]  # returns: the process was killed


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_table, "find_spec", lambda name: None)
    assert set(map(why_not, PEERS.values())) == {
        "kt-kernel is not installed",
        "llama-cpp-python is not installed",
        "torch is not installed",
    }
