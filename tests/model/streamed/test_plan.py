"""What a pass is said to take, against what it takes."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import EXAMPLE
from helpers.wide_moe import layer_shapes

pytest.importorskip("transformers")

from ktconv.errors import DiskSpaceError, MemoryLimitError, MemoryShortError
from ktconv.model.streamed.parts import PartedModel
from ktconv.model.streamed.plan import Speed, measure_speed, plan_pass
from ktconv.source import open_checkpoint
from ktconv.source.reading.reader import SourceReader
from ktconv.system import machine

pytestmark = [pytest.mark.slow, pytest.mark.torch]

WINDOWS = [48] * 6


@pytest.fixture(scope="module")
def parted() -> PartedModel:
    return PartedModel(open_checkpoint(EXAMPLE))


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process and a machine whose memory other tests do not change."""
    monkeypatch.setattr(machine, "resident_memory", lambda: 400 << 20)
    monkeypatch.setattr(machine, "available_memory", lambda: 8 << 30)


def test_all_of_the_source_is_read_once(parted: PartedModel) -> None:
    tensors = sum(
        tensor["data_offsets"][1] - tensor["data_offsets"][0]
        for file in EXAMPLE.glob("*.safetensors")
        for name, tensor in header(file).items()
        if name != "__metadata__"
    )
    assert plan_pass(parted, WINDOWS).read == tensors


def header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        found: dict[str, Any] = json.loads(opened.read(length))
    return found


def test_flops_are_those_that_torch_counts(parted: PartedModel) -> None:
    """Of the model in memory, on the same windows."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ktconv.model import load_model

    model, _ = load_model(EXAMPLE)
    model.set_experts_implementation("eager")
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        for length in WINDOWS:
            model(torch.zeros((1, length), dtype=torch.int64), use_cache=False)
    plan = plan_pass(parted, WINDOWS)
    counted = counter.get_total_flops()
    assert plan.dense_flops + plan.expert_flops == pytest.approx(counted, rel=0.05)
    assert plan_pass(parted, WINDOWS, head=False).dense_flops < plan.dense_flops


def test_a_second_side_takes_twice_as_much(parted: PartedModel) -> None:
    one, two = plan_pass(parted, WINDOWS), plan_pass(parted, WINDOWS, 2)
    assert two.read == one.read
    assert (two.states, two.expert_flops) == (2 * one.states, 2 * one.expert_flops)
    assert one.dense_flops < two.dense_flops <= 2 * one.dense_flops
    assert two.runs == 2 * one.runs and two.peak_memory > one.peak_memory
    assert plan_pass(parted, WINDOWS, 2, converted=True).experts_memory > two.experts_memory


def test_threads_have_experts_of_their_own(parted: PartedModel) -> None:
    one, eight = (plan_pass(parted, WINDOWS, threads=threads) for threads in (1, 8))
    assert 2 * eight.experts_memory == 9 * one.experts_memory
    assert eight.peak_memory > one.peak_memory


def test_memory_is_shared_out(parted: PartedModel) -> None:
    """From the least that is enough to what changes nothing more."""
    windows = [512] * 40
    with pytest.raises(MemoryLimitError, match=r"--max-memory 1\.0 MB is too small") as raised:
        plan_pass(parted, windows, 2, threads=8, max_memory=1_000_000)
    least = int(re.findall("--max-memory ([0-9]+)MiB", raised.value.hint or "")[0])
    plans = [
        plan_pass(parted, windows, 2, threads=8, max_memory=size << 20)
        for size in range(least, least + 400, 5)
    ]
    for size, plan in zip(range(least, least + 400, 5), plans, strict=True):
        assert plan.peak_memory <= size << 20
    for smaller, larger in pairwise(plans):
        assert smaller.parked <= larger.parked
        assert smaller.scratch_file >= larger.scratch_file
        assert smaller.experts_memory <= larger.experts_memory
        assert smaller.dense_flops >= larger.dense_flops
    first, last, free = plans[0], plans[-1], plan_pass(parted, windows, 2, threads=8)
    assert first.parked == 0 and first.scratch_file > 0 and first.disk > last.disk
    assert "attention is computed twice for 80 of 80" in first.lines()[1]
    assert last.parked == 80 and last.scratch_file == 0 and last == free
    with pytest.raises(MemoryLimitError):
        plan_pass(parted, windows, 2, threads=8, max_memory=(least - 1) << 20)


def test_windows_that_are_too_long(parted: PartedModel) -> None:
    with pytest.raises(MemoryShortError, match=r"but only 8\.") as raised:
        plan_pass(parted, [3_000_000])
    assert "shorter windows" in (raised.value.hint or "")


def test_taps_take_memory_too(parted: PartedModel) -> None:
    plain, tapped = plan_pass(parted, WINDOWS), plan_pass(parted, WINDOWS, taps=1 << 30)
    assert tapped.peak_memory > plain.peak_memory + (1 << 30) - (64 << 20)


def test_the_disk_of_the_work_folder(
    parted: PartedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = plan_pass(parted, WINDOWS, folder=tmp_path).disk
    monkeypatch.setattr(machine, "disk_free", lambda _: needed - 1)
    with pytest.raises(DiskSpaceError, match=f"kept in {tmp_path}") as raised:
        plan_pass(parted, WINDOWS, folder=tmp_path)
    assert "--work-dir DIR" in (raised.value.hint or "")
    (tmp_path / "states-a.bin").write_bytes(b"x")  # of a pass that goes on
    assert plan_pass(parted, WINDOWS, folder=tmp_path).disk == needed


def test_no_weight_is_read(parted: PartedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a plan reads headers only")

    monkeypatch.setattr(SourceReader, "open", refuse)
    plan_pass(PartedModel(open_checkpoint(EXAMPLE)), WINDOWS)


def test_time_is_of_what_is_slower(parted: PartedModel) -> None:
    plan = plan_pass(parted, WINDOWS)
    assert plan.seconds is None and "about 0:" not in plan.lines()[0]
    slow_disk = Speed(read=plan.read / 100, decode=1e12, dense=1e15, experts=1e15)
    assert plan_pass(parted, WINDOWS, speed=slow_disk).seconds == pytest.approx(100)
    dense, experts = plan.dense_flops / 50, plan.expert_flops / 70
    slow_cores = Speed(read=1e15, decode=float("inf"), dense=dense, experts=experts)
    timed = plan_pass(parted, WINDOWS, speed=slow_cores)
    assert timed.seconds == pytest.approx(120) and "about 2:00" in timed.lines()[0]
    assert json.loads(json.dumps(timed.facts()))["estimated_seconds"] == timed.seconds


def test_a_measurement_reads_little(parted: PartedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read, done = os.preadv, []

    def counted(*arguments: Any) -> int:
        done.append(read(*arguments))
        return done[-1]

    monkeypatch.setattr(os, "preadv", counted)
    speed = measure_speed(parted, sum(WINDOWS), max(WINDOWS))
    size = sum(source.nbytes for source in parted.checkpoint.sources)
    assert sum(done) <= size / 100
    assert all(one > 0 for one in speed) and np.isfinite([speed.dense, speed.experts]).all()


def test_a_speed_is_that_of_its_threads(
    parted: PartedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is measured once in a process, but again when torch has another number of threads."""
    torch, multiplied = pytest.importorskip("torch"), []
    linear, before = torch.nn.functional.linear, torch.get_num_threads()

    def counted(*arguments: Any) -> Any:
        multiplied.append(torch.get_num_threads())
        return linear(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    try:
        for threads in (before + 1, before + 1, before + 2):
            torch.set_num_threads(threads)
            measure_speed(parted, sum(WINDOWS), max(WINDOWS))
    finally:
        torch.set_num_threads(before)
    assert {*multiplied} == {before + 1, before + 2}


# ---- against the peak of a process -----------------------------------------------------

HIDDEN, INNER, EXPERTS, LAYERS, VOCAB = 1024, 1024, 8, 16, 2048
LAYER = layer_shapes(HIDDEN, INNER, EXPERTS, queries=512)
CODE = """
import json, re, sys
from pathlib import Path
import torch
from ktconv.errors import MemoryLimitError
from ktconv.source import open_checkpoint
from ktconv.model.streamed.experts import SourceExperts
from ktconv.model.streamed.parts import PartedModel
from ktconv.model.streamed.plan import plan_pass
from ktconv.model.streamed.run import StreamedPass
from ktconv.model.streamed.states import Scratch, States

folder = Path(sys.argv[1])
parted = PartedModel(open_checkpoint(folder))
windows = [torch.arange(32)[None] * 60 + n for n in range(2)]
# The least has what the interpreter and its libraries take, which differs between machines.
try:
    plan_pass(parted, [32] * 2, threads=2, max_memory=1, folder=folder)
except MemoryLimitError as error:
    limit = (int(re.search("([0-9]+)MiB", error.hint)[1]) + 16) << 20
plan = plan_pass(parted, [32] * 2, threads=2, max_memory=limit, folder=folder)
with States(folder, 1, 2) as states, Scratch(folder, plan.scratch_memory) as scratch:
    one = StreamedPass(parted, windows, states, scratch, parked=plan.parked)
    memory, read = plan.experts_memory, []
    runner = SourceExperts(
        parted.checkpoint, parted.dtype, threads=2, memory=memory, read=read.append
    )
    one.run(runner, head=True)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps([limit, plan.peak_memory, peak, sum(read)]))
"""


def write_sparse(folder: Path) -> int:
    """A Qwen3-MoE model whose large matrices are zeros, which take no room in a file with holes;
    its size."""
    settings = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "num_experts_per_tok": 2, "vocab_size": VOCAB, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "intermediate_size": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    return write_shapes(folder / "model.safetensors", shapes)


def write_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """bf16 tensors: ones in vectors, random numbers in embeddings and routers, else zeros."""
    rng, offset = np.random.default_rng(0), 0
    entries: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
        for name, entry in entries.items():
            shape = shapes[name]
            if len(shape) > 1 and not re.search(r"embed|mlp\.gate\.", name):
                continue
            values = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape)
            bits = (np.float32(values).view(np.uint32) >> 16).astype(np.uint16)
            file.seek(8 + len(text) + entry["data_offsets"][0])
            file.write(bits.tobytes())
    return offset


def test_the_peak_of_a_model_larger_than_memory(tmp_path: Path) -> None:
    """It stays below the limit and what is announced, which is not twice what it is."""
    size = write_sparse(tmp_path)
    words = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    limit, planned, peak, read = json.loads(done.stdout)
    assert planned / 2 < peak <= planned <= limit < size
    assert size / 2 < read <= size
