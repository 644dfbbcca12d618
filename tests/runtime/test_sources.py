"""Where a layer's weights come from: a converted model, a checkpoint, arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import EXAMPLE

from ktconv.errors import CheckpointError, UsageError
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.layers import load
from ktconv.source import read_header, settings
from ktconv.targets.packed import weights
from ktconv.targets.packed.target import Options

RNG = np.random.default_rng(5)
X = RNG.standard_normal((7, 128), np.float32)
IDS = np.ascontiguousarray(np.argsort(RNG.random((7, 8)), axis=1)[:, :2])
WEIGHTS = RNG.random((7, 2), np.float32)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The example by the layout of its output."""
    paths = {}
    for layout in ("safetensors", "layers"):
        path = paths[layout] = tmp_path_factory.mktemp(layout) / "out"
        quantize_cpu(Request(str(EXAMPLE), path, Options("int4", 2, layout=layout)))
    return paths


def values(layer: MoELayer, expert: int, which: int) -> Any:
    matrix = layer._packed.streams(expert)[which]
    assert matrix is not None
    return matrix.values()


def test_all_ways_lead_to_the_same_numbers(converted: dict[str, Path], pool: Pool) -> None:
    """Shards, layer folders, and the checkpoint's own weights packed in memory."""
    own = MoELayer.load(EXAMPLE, 1, pool=pool)
    assert own.method == "bf16"
    gate, up, down = ([values(own, e, which) for e in range(own.experts)] for which in range(3))
    layers = [
        MoELayer.load(converted["safetensors"], 1, pool=pool),
        MoELayer.load(converted["layers"], 1, pool=pool),
        MoELayer.pack(gate, up, down, "int4", parts=2, pool=pool),
    ]
    assert {repr(layer) for layer in layers} == {
        "MoELayer(8 experts of int4, hidden 128, intermediate 256, 2 parts)"
    }
    first, *others = [layer(X, IDS, WEIGHTS) for layer in layers]
    assert all(np.array_equal(first, other) for other in others)
    exact = own(X, IDS, WEIGHTS)
    assert np.linalg.norm(first - exact) < 0.3 * np.linalg.norm(exact)


@pytest.mark.parametrize("source", ["safetensors", "checkpoint", "arrays"])
def test_slots_hold_any_expert(source: str, converted: dict[str, Path], pool: Pool) -> None:
    """A permutation with replicas; ids are slots (D5)."""
    slots = [5, 0, 3, 3, 7, 5]

    def made(**more: Any) -> MoELayer:
        if source == "arrays":
            rng = np.random.default_rng(1)
            shapes = (8, 256, 128), (8, 256, 128), (8, 128, 256)
            gate, up, down = (rng.random(shape, np.float32) for shape in shapes)
            return MoELayer.pack(gate, up, down, pool=pool, **more)
        path = EXAMPLE if source == "checkpoint" else converted[source]
        return MoELayer.load(path, 0, pool=pool, **more)

    plain, mapped = made(), made(slots=slots)
    assert mapped.experts == 6 and mapped.slots.tolist() == slots
    chosen = np.ascontiguousarray(IDS % 6)
    expected = plain(X, np.array(slots)[chosen], WEIGHTS)
    assert np.allclose(mapped(X, chosen, WEIGHTS), expected, rtol=1e-5, atol=1e-6)
    assert mapped.weight_bytes == plain.weight_bytes // 2
    for wrong in ([8], [-1], [], [0.5], [[0]]):
        with pytest.raises(UsageError, match="slot"):
            made(slots=wrong)


def test_every_layer_at_once(converted: dict[str, Path], pool: Pool) -> None:
    for path in (EXAMPLE, converted["safetensors"], converted["layers"]):
        layers = MoELayer.load_all(path, pool=pool)
        assert list(layers) == [0, 1]
        for number, layer in layers.items():
            alone = MoELayer.load(path, number, pool=pool)
            assert np.array_equal(layer(X, IDS, WEIGHTS), alone(X, IDS, WEIGHTS))


def test_headers_are_read_once(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    """However many layers there are: those of large models take seconds."""
    read: list[str] = []
    for room, name in ((load, "open_packed"), (load, "read_run"), (settings, "read_config")):
        function = getattr(room, name)

        def counted(path: Path, *more: Any, name: str = name, function: Any = function) -> Any:
            read.append(name)
            return function(path, *more)

        monkeypatch.setattr(room, name, counted)
    assert len(MoELayer.load_all(converted["safetensors"], pool=pool)) == 2
    assert sorted(read) == ["open_packed", "read_config", "read_run"]


def test_one_layer_reads_its_own_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    """Of many shards, those that have something of it; the same layer as among all."""
    path = tmp_path / "out"
    quantize_cpu(Request(str(EXAMPLE), path, Options("int8", 2, max_shard_size=200_000)))
    every = MoELayer.load_all(path, pool=pool)
    read: list[str] = []

    def counted(shard: Path) -> Any:
        read.append(shard.name)
        return read_header(shard)

    monkeypatch.setattr(weights, "read_header", counted)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for number, layer in every.items():
        read.clear()
        alone = MoELayer.load(path, number, pool=pool)
        assert np.array_equal(layer(X, IDS, WEIGHTS), alone(X, IDS, WEIGHTS))
        assert sorted(read) == sorted(
            {file for name, file in index.items() if name.startswith(f"blk.{number}.")}
        )
        assert len(read) < len(set(index.values()))
    with pytest.raises(UsageError, match=r"has no experts of layer 2") as refusal:
        MoELayer.load(path, 2, pool=pool)
    assert refusal.value.hint == "it has [0, 1]"
    with pytest.raises(UsageError, match="layer"):
        MoELayer.load(path, -1, pool=pool)


def test_a_layer_whose_shard_is_damaged(tmp_path: Path, pool: Pool) -> None:
    """Is refused; others are not."""
    path = tmp_path / "out"
    quantize_cpu(Request(str(EXAMPLE), path, Options("int8", 1, max_shard_size=200_000)))
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    of = [{file for name, file in index.items() if name.startswith(f"blk.{n}.")} for n in (0, 1)]
    shard = path / min(of[1] - of[0])
    shard.write_bytes(shard.read_bytes()[:-1])
    MoELayer.load(path, 0, pool=pool)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated"):
        MoELayer.load(path, 1, pool=pool)
    shard.write_bytes(b"x" * 100)  # whatever was in it
    with pytest.raises(CheckpointError, match=shard.name):
        MoELayer.load(path, 0, pool=pool)


def test_all_layers_of_an_output_without_a_shard(tmp_path: Path, pool: Pool) -> None:
    """Are refused by the names of the shard and of its layers, and where there is no index by the
    layers of the manifest; a layer that is there is loaded."""
    path = tmp_path / "out"
    quantize_cpu(Request(str(EXAMPLE), path, Options("int8", 1, max_shard_size=200_000)))
    index = path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    of = [{file for name, file in names.items() if name.startswith(f"blk.{n}.")} for n in (0, 1)]
    for shard in of[1] - of[0]:
        (path / shard).unlink()
    first = min(of[1] - of[0])
    with pytest.raises(CheckpointError, match=rf"lacks {first}, with experts of layer 1$"):
        MoELayer.load_all(path, pool=pool)
    MoELayer.load(path, 0, pool=pool)
    for shard in of[1] & of[0]:
        (path / shard).unlink()
    index.unlink()
    with pytest.raises(CheckpointError, match=r"lacks the experts of layers? .*1, which"):
        MoELayer.load_all(path, pool=pool)


def test_parts_of_a_checkpoint_are_those_of_the_pools_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pool(2) as pool:
        monkeypatch.setattr(pool, "os_nodes", (0, 0))
        bound: list[int] = []
        monkeypatch.setattr(pool, "bind", lambda memory, node: bound.append(node))
        assert MoELayer.load(EXAMPLE, pool=pool).parts == 2
        monkeypatch.setattr(pool, "os_nodes", (0,) * 3)
        assert MoELayer.load(EXAMPLE, pool=pool).parts == 1  # 256 columns are not three parts
        assert MoELayer.load(EXAMPLE, parts=4, pool=pool).parts == 4
        assert len(bound) == 2 + 1 + 4


def test_arrays_that_cannot_be_packed(pool: Pool) -> None:
    gate, up, down = np.ones((2, 128, 128)), np.ones((2, 128, 128)), np.ones((2, 128, 128))
    stacks: dict[str, Any] = {
        "gate": np.float32(gate), "up": np.float32(up), "down": np.float32(down),
    }  # fmt: skip
    for match, changes in (
        ("gate must have 2 arrays", {"gate": stacks["gate"][:1]}),
        ("have a gate", {"gate": None}),
        ("up is neither a NumPy array nor", {"up": None}),
        ("down is a single number", {"down": np.array(1.0)}),
        ("biases must be those of gate, up and down", {"biases": np.zeros((2, 128))}),
        ("biases must be those of gate, up and down", {"biases": (None, None)}),
        ("parts must be 1 or more", {"parts": 0}),
    ):
        with pytest.raises(UsageError, match=match):
            MoELayer.pack(**(stacks | changes), pool=pool)


def test_refusals(converted: dict[str, Path], tmp_path: Path, pool: Pool) -> None:
    path = converted["safetensors"]
    for match, error, arguments in (
        ("has no experts of layer 9", UsageError, {"path": path, "layer": 9}),
        ("method .* is int4, not int8", UsageError, {"path": path, "method": "int8"}),
        ("number of parts .* is 2, not 1", UsageError, {"path": path, "parts": 1}),
        ("unknown method 'q4'", UsageError, {"path": path, "method": "q4"}),
        ("does not exist", CheckpointError, {"path": tmp_path / "nothing"}),
        ("no experts of layer 2", UsageError, {"path": EXAMPLE, "layer": 2}),
        ("int4 does not have exactly", UsageError, {"path": EXAMPLE, "method": "int4"}),
        ("cannot be split into 3 parts", UsageError, {"path": EXAMPLE, "parts": 3}),
        ("parts must be an integer, not '2'", UsageError, {"path": EXAMPLE, "parts": "2"}),
        ("layer must be an integer, not 1.0", UsageError, {"path": EXAMPLE, "layer": 1.0}),
        ("unknown method 4", UsageError, {"path": EXAMPLE, "method": 4}),
    ):
        with pytest.raises(error, match=match):
            MoELayer.load(**arguments, pool=pool)


def test_weights_are_not_placed_for_a_closed_pool() -> None:
    closed = Pool(1)
    closed.close()
    with pytest.raises(UsageError, match="the pool is closed"):
        MoELayer.load(EXAMPLE, pool=closed)
    gate = np.ones((1, 64, 64), np.float32)
    with pytest.raises(UsageError, match="the pool is closed"):
        MoELayer.pack(gate, gate, gate, "bf16", pool=closed)
