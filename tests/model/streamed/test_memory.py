"""Bytes that a pass reads, and memory that it takes, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.wide_moe import layer_shapes

pytestmark = [pytest.mark.slow, pytest.mark.torch]

HIDDEN, INNER, EXPERTS, VOCAB, FEW, MANY = 256, 512, 8, 1024, 3, 9
LAYER = layer_shapes(HIDDEN, INNER, EXPERTS, queries=256)
MIB = 1 << 20
# What is read beside weights: hidden states between layers, /proc, Python's own modules.
OTHER_READS = 2 * MIB

# One process for all, since it takes seconds to import PyTorch. Each line of its input is a pass;
# each of its output what that took.
PROGRAM = """
import json, re, resource, sys
from pathlib import Path
import torch
from ktconv.source import open_checkpoint
from ktconv.model.streamed.experts import SourceExperts
from ktconv.model.streamed.parts import PartedModel
from ktconv.model.streamed.run import StreamedPass
from ktconv.model.streamed.states import Scratch, States

# oneDNN's memory depends on the CPU: with AMX it generates code, and buffers, for every new shape.
torch.backends.mkldnn.set_flags(False)

WINDOWS = [torch.randint(0, 1024, (1, 12), generator=torch.Generator().manual_seed(n))
           for n in range(4)]

class Sums:
    def __init__(self):
        self.sums = []
    def layer(self, index, window, values):
        pass
    def logits(self, window, logits):
        self.sums.append([float(one.double().sum()) for one in logits])
    def state(self):
        return {}
    def restore(self, state):
        pass

def proc(file, key):
    text = Path("/proc/self", file).read_text()
    return int(re.search(key + r":\\s+(\\d+)", text)[1]) * (1024 if file == "status" else 1)

def passed(source, folder, sides=1, parked=None):
    Path(folder).mkdir()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    read, before = proc("io", "rchar"), proc("status", "VmRSS")
    parted = PartedModel(open_checkpoint(source))
    experts, seen = SourceExperts(parted.checkpoint, parted.dtype), Sums()
    with States(Path(folder), sides, len(WINDOWS)) as states:
        with Scratch(Path(folder), 0) as scratch:
            one = StreamedPass(parted, WINDOWS, states, scratch, sides=sides, parked=parked)
            one.run(experts, [seen], head=True)
    return {"read": proc("io", "rchar") - read, "sums": seen.sums,
            "grown": proc("status", "VmHWM") - before}

for line in sys.stdin:
    order = json.loads(line)
    limit = order.pop("limit", None)
    if limit is not None:
        data = proc("status", "VmData") + limit
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
        try:
            torch.ones(2 * limit, dtype=torch.uint8)
            sys.exit("the limit does not hold")
        except RuntimeError:
            pass
    print(json.dumps(passed(**order)), flush=True)
"""


class Source(NamedTuple):
    path: Path
    nbytes: int
    layer: int  # bytes of one


def write(path: Path, layers: int, fp8: bool = False) -> Source:
    """A Qwen3-MoE model of random weights; in FP8 with blocks of 128 x 128, but for the rest."""
    path.mkdir()
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "num_experts_per_tok": 4, "vocab_size": VOCAB, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "intermediate_size": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in LAYER.items()}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if fp8 and "_proj." in name:
            tensors[name] = "F8_E4M3", shape
            tensors[f"{name}_scale_inv"] = "F32", (shape[0] // 128, shape[1] // 128)
        else:
            tensors[name] = "BF16", shape
    nbytes = _write(path / "model.safetensors", tensors)
    return Source(path, nbytes, nbytes // layers)


def _write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Each tensor is a piece of the same random numbers; the bytes of all."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(2 * MIB, dtype=np.float32) / 8
    pools = {
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
        "F8_E4M3": rng.integers(0, 0x78, 2 * MIB, np.uint8) | rng.choice([0, 0x80], 2 * MIB),
        "F32": rng.uniform(1e-4, 1e-3, MIB).astype(np.float32),
    }
    pools["F8_E4M3"] = pools["F8_E4M3"].astype(np.uint8)
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + int(np.prod(shape)) * pools[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, shape in tensors.values():
            size = int(np.prod(shape))
            first = int(rng.integers(0, len(pools[dtype]) - size))
            file.write(pools[dtype][first : first + size].tobytes())
    return end


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    return {
        "few": write(folder / "few", FEW),
        "many": write(folder / "many", MANY),
        "fp8": write(folder / "fp8", FEW, fp8=True),
    }


@pytest.fixture(scope="module")
def took(
    sources: Mapping[str, Source], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each pass took."""
    folder = tmp_path_factory.mktemp("states")
    orders: dict[str, dict[str, Any]] = {
        "first": {"source": "few"},  # libraries take memory when they are used first
        "few": {"source": "few"},
        "many": {"source": "many"},
        "many, none parked": {"source": "many", "parked": 0},
        "fp8": {"source": "fp8"},
        "fp8, two sides, one parked": {"source": "fp8", "sides": 2, "parked": 1},
        "limited": {"source": "many", "sides": 2, "limit": sources["many"].nbytes // 4},
    }
    lines = [
        json.dumps(order | {"source": str(sources[order["source"]].path), "folder": str(place)})
        for order, place in zip(
            orders.values(), (folder / str(one) for one in range(99)), strict=False
        )
    ]
    # One arena for all threads: others would be memory that a pass takes or not by chance.
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(lines), capture_output=True, text=True, check=False, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(orders, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("case", "source"),
    [
        ("few", "few"),
        ("many", "many"),
        ("many, none parked", "many"),
        ("fp8", "fp8"),
        ("fp8, two sides, one parked", "fp8"),
        ("limited", "many"),
    ],
)
def test_the_source_is_read_once(
    case: str, source: str, took: Mapping[str, Any], sources: Mapping[str, Source]
) -> None:
    """For all windows and both sides; embedding and head are mapped, not read, and few experts
    are chosen by no token."""
    mapped, size = 2 * VOCAB * HIDDEN * 2, sources[source].nbytes
    assert 0.9 * size - mapped <= took[case]["read"] <= size + OTHER_READS


def test_memory_is_that_of_a_layer(took: Mapping[str, Any], sources: Mapping[str, Source]) -> None:
    """Whatever the number of layers, and so the size of the source."""
    many, few = took["many"]["grown"], took["few"]["grown"]
    assert abs(many - few) < sources["many"].layer
    assert sources["many"].nbytes > 2.5 * sources["few"].nbytes
    for case in ("many", "many, none parked", "limited"):
        assert took[case]["grown"] < sources["many"].nbytes / 4, case


def test_a_model_larger_than_memory(took: Mapping[str, Any]) -> None:
    """Under a limit of a quarter of its size, which held when it was tried."""
    assert took["limited"]["sums"] == [2 * one for one in took["many"]["sums"]]


def test_windows_that_are_not_parked_give_the_same(took: Mapping[str, Any]) -> None:
    assert took["many"]["sums"] == took["many, none parked"]["sums"]
    assert took["fp8, two sides, one parked"]["sums"] == [2 * one for one in took["fp8"]["sums"]]
    assert all(np.isfinite(one["sums"]).all() for one in took.values())
