"""The whole run as a library call, on layers of a few kilobytes."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.reports import SCHEMA, problems
from helpers import amx, gpt_oss
from helpers.convert import Converted, convert
from helpers.families import Tensor, numbered, random_weights, write_checkpoint
from helpers.nemotron import write_nemotron
from helpers.paths import EXAMPLE
from msgspec.structs import replace

from ktconv import native
from ktconv.bench import cases, run
from ktconv.bench.cases import Request, prepare
from ktconv.bench.measure import Effort
from ktconv.bench.presets import PRESETS, parse_shape
from ktconv.bench.routing import parse_routing
from ktconv.bench.run import bench
from ktconv.bench.weights import RandomWeights
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import FORMATS, format_named
from ktconv.runtime.layers import pack_experts
from ktconv.system import machine
from ktconv.system.machine import Cpu
from ktconv.system.pool import Pool

pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]


def request(
    methods: Iterable[str] = ("int4",), shape: str = "128,256,5,2", **changes: Any
) -> Request:
    defaults = Request(
        methods=tuple(map(format_named, methods)),
        shapes=(parse_shape(shape),),
        tokens=(1,),
        threads=(1,),
        isas=(native.isa(),),
        effort=Effort(iterations=1),
    )
    return replace(defaults, **changes)


def quiet(_: str) -> None:
    """Nobody listens."""


def test_rows_of_all_that_was_asked_for() -> None:
    """Rows of three methods; `bench --method all` has the others."""
    heard: list[str] = []
    methods = ("int8", "bf16", "mxfp4")
    asked = request(methods, tokens=(1, 2), threads=(1, 2), isas=("scalar",))
    report = bench(asked, heard.append)
    found = [(row.method, row.tokens, row.threads, row.isa) for row in report.rows]
    assert found == [
        (method, tokens, threads, "scalar")
        for method in methods
        for tokens in (1, 2)
        for threads in (1, 2)
    ]
    assert {(limit.isa, limit.threads) for limit in report.limits} == {("scalar", 1), ("scalar", 2)}
    assert problems(json.loads(json.dumps(report.facts())), SCHEMA) == []
    assert any("packing 5 experts" in line for line in heard)


def test_every_level(isa: str, tiles: amx.Emulator | None) -> None:
    before = native.isa()
    report = bench(
        request(["int8", "bf16", "fp8"], "128,128,3,2", isas=(isa,), tokens=(17,)), quiet
    )
    assert [row.isa for row in report.rows] == [isa] * 3
    assert native.isa() == before
    for row in report.rows:
        assert 0 < row.relative_error <= FORMATS[row.method].tolerance
        assert row.source_error is not None and row.source_error >= 0.9 * row.relative_error


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_have_the_same_errors_nearly(parts: int) -> None:
    report = bench(request(["mxfp4"], parts=parts, tokens=(5,), threads=(2,)), quiet)
    assert [row.parts for row in report.rows] == [parts]
    assert report.rows[0].relative_error < 0.01


@pytest.mark.parametrize(
    ("parts", "nodes", "homes"),
    [
        (1, 1, [0]),
        (1, 4, [0]),
        (2, 2, [0, 1]),
        (4, 2, [0, 0, 1, 1]),
        (3, 2, [0, 0, 1]),
        (2, 3, [0, 2]),
        (2, 4, [0, 2]),
    ],
)
def test_parts_lie_where_they_are_computed(parts: int, nodes: int, homes: list[int]) -> None:
    pool = native.Pool(nodes, nodes=list(range(nodes)))
    assert [native.part_node(part, parts, pool) for part in range(parts)] == homes
    for part in (-1, parts):
        with pytest.raises(ValueError, match=f"part {part} of {parts} does not exist"):
            native.part_node(part, parts, pool)
    pool.close()


def test_activations_of_presets_are_used() -> None:
    """gpt-oss with its limits, shrunk: the reference would differ if either side ignored them."""
    shape = replace(PRESETS["gpt-oss-120b"], hidden=128, intermediate=128, experts=4)
    report = bench(request(["bf16"], shapes=(shape,), tokens=(7,)), quiet)
    assert report.rows[0].relative_error < 0.01


def test_experts_without_gate() -> None:
    """Two matrices are read and multiplied with, not three."""
    shapes = [
        replace(PRESETS[name], hidden=256, intermediate=256, experts=4, top_k=2)
        for name in ("nemotron-3-nano", "qwen3-30b-a3b")
    ]
    asked = request(["int8", "mxfp4"], shapes=tuple(shapes), tokens=(1, 9))
    cases_of = [layer.cases for layer in prepare(asked).layers]
    for ungated, gated in zip(cases_of[:2], cases_of[2:], strict=True):
        assert 3 * ungated[0].expert_bytes == 2 * gated[0].expert_bytes
        assert 3 * ungated[0].shape.operations == 2 * gated[0].shape.operations
    report = bench(asked, quiet)
    for row in report.rows:
        assert row.relative_error < 0.1 and row.kernel_error is not None
        assert row.kernel_error < 0.005


@pytest.mark.parametrize("routing", ["balanced", "concentrated", "zipf:1.1"])
def test_routings(routing: str) -> None:
    report = bench(request(routing=parse_routing(routing), tokens=(16,)), quiet)
    row = report.rows[0]
    assert row.routing == routing
    assert row.tokens_per_expert * row.distinct_experts == pytest.approx(32)
    assert (row.distinct_experts == 2) == (routing == "concentrated")


def test_a_trace_with_experts_that_live_elsewhere(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", ids=np.array([[0, -1], [4, 0], [-1, -1]]))
    routing = parse_routing(f"trace:{tmp_path / 'trace.npz'}")
    row = bench(request(routing=routing, tokens=(3,)), quiet).rows[0]
    assert (row.distinct_experts, row.tokens_per_expert) == (2.0, 1.5)


def test_layers_do_not_pile_up_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    packed = pack_experts

    def watched(*arguments: Any, **named: Any) -> Any:
        gc.collect()
        assert not alive
        experts = packed(*arguments, **named)
        alive.add(experts)
        return experts

    monkeypatch.setattr(run, "pack_experts", watched)
    assert len(bench(request(["int4", "int8", "bf16"]), quiet).rows) == 3


def test_a_converted_model(tmp_path: Path) -> None:
    for method, numa in (("int4", 2), ("int8", 1)):
        convert(EXAMPLE, tmp_path / method, method=method, numa=numa)
        asked = request([], shapes=(), model=tmp_path / method, tokens=(1, 6))
        first, second = bench(asked, quiet).rows
        assert (first.method, first.parts, first.shape["name"]) == (method, numa, method)
        config = json.loads((EXAMPLE / "config.json").read_text())
        assert first.shape["top_k"] == config["num_experts_per_tok"]
        assert first.source_error is None and second.relative_error < 0.05
        with pytest.raises(UsageError, match="has no experts of layer 77"):
            bench(replace(asked, layer=77), quiet)
        with pytest.raises(UsageError, match="--top-k 999 is more than"):
            bench(replace(asked, top_k=999), quiet)


def test_a_model_whose_experts_have_biases(tmp_path: Path) -> None:
    """They are in the reference of the kernels, too, and matter here."""
    blocks = gpt_oss.Blocks()
    config = {**gpt_oss.SIZES, "model_type": "gpt_oss", "num_experts_per_tok": 1}
    model = write_checkpoint(tmp_path / "model", blocks.mxfp4, config)
    convert(model, tmp_path / "out", method="int8", allow_activation_mismatch=True)
    (row,) = bench(request([], shapes=(), model=tmp_path / "out", tokens=(6,)), quiet).rows
    assert row.relative_error < 0.1


def test_a_model_whose_experts_have_no_gate(tmp_path: Path) -> None:
    model, _ = write_nemotron(tmp_path / "model")
    convert(model, tmp_path / "out", method="int8", numa=2, allow_activation_mismatch=True)
    asked = request([], shapes=(), model=tmp_path / "out", tokens=(6,))
    (case,) = prepare(asked).cases
    assert case.expert_bytes == 2 * (384 * 256) + 4 * (384 + 2 * 256)  # down's scales in each part
    (row,) = bench(asked, quiet).rows
    assert row.relative_error < 0.1 and row.kernel_error is not None and row.kernel_error < 0.005


@pytest.mark.parametrize(
    ("config", "top_k"),
    [
        ({"model_type": "ernie4_5_moe", "moe_k": 3}, [3, 3]),
        ({"llm_config": {"num_experts_per_token": 3}}, [3, 3]),
        ({"thinker_config": {"text_config": {"num_experts_per_tok": 3}}}, [3, 3]),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 3]}, [1, 3]),
        ({}, [4, 4]),  # as many as there are, of 8
    ],
)
def test_top_k_of_a_model(config: dict[str, Any], top_k: list[int], tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        tensors |= numbered(f"model.layers.{layer}.mlp.experts", random_weights())
    convert(write_checkpoint(tmp_path / "model", tensors, config), tmp_path / "out", method="int8")
    asked = request([], shapes=(), model=tmp_path / "out", tokens=(2,))
    found = [bench(replace(asked, layer=layer), quiet).rows[0].shape["top_k"] for layer in (0, 1)]
    assert found == top_k


def test_a_model_without_packed_experts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no packed experts"):
        bench(request([], shapes=(), model=tmp_path), quiet)


# ---- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words", "hint"),
    [
        (
            {"methods": ("int4",), "shape": "96,256,4,2"},
            "int4 does not support hidden size 96",
            "bf16",
        ),
        ({"methods": ("int8",), "shape": "128,96,4,2"}, "intermediate size of a part 96", "bf16"),
        ({"methods": ("fp8",), "shape": "128,192,4,2"}, "multiple of 128", "fp8-channel"),
        ({"shape": "128,256,4,2", "parts": 3}, "cannot be split into 3 parts", "divides"),
        ({"methods": ("bf16",), "shape": "128,100,4,2"}, "multiple of 32", "multiples of 32"),
        ({"shape": "128,256,8,4", "experts": 3}, "--experts 3 is less than the 4", "at least 4"),
        ({"shape": "128,256,8,4", "experts": 9}, "--experts 9 is more than the 8", "leave it out"),
    ],
)
def test_what_cannot_be_held(changes: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        prepare(request(**changes))
    assert caught.value.hint and hint in caught.value.hint


def test_fewer_experts() -> None:
    asked = request(shape="128,256,100,2", experts=3)
    assert prepare(asked).layers[0].shape.experts == 3
    assert bench(asked, quiet).rows[0].shape["experts"] == 3


def test_a_layer_that_does_not_fit_says_how_many_experts_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ktconv.system.machine.available_memory", lambda: 20 << 30)
    with pytest.raises(UsageError, match="384 experts of kimi-k2 in bf16 take") as caught:
        prepare(request(["bf16"], "kimi-k2"))
    assert caught.value.hint
    fitting = int(caught.value.hint.split()[1])
    assert fitting > 100
    prepare(request(["bf16"], "kimi-k2", experts=fitting))
    with pytest.raises(UsageError):
        prepare(request(["bf16"], "kimi-k2", experts=fitting + 1))
    monkeypatch.setattr("ktconv.system.machine.available_memory", lambda: 1 << 30)
    with pytest.raises(UsageError) as caught:
        prepare(request(["bf16"], "kimi-k2"))
    assert caught.value.hint == "no useful number would fit"


@pytest.mark.parametrize("methods", [("int4", "int8", "bf16"), ("bf16", "mxfp4"), ("fp8",)])
def test_the_number_that_would_fit_is_that_of_the_largest_method(
    methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.system.machine.available_memory", lambda: 20 << 30)
    with pytest.raises(UsageError) as caught:
        prepare(request(methods, "kimi-k2"))
    fitting = int(str(caught.value.hint).split()[1])
    prepare(request(methods, "kimi-k2", experts=fitting))
    with pytest.raises(UsageError):
        prepare(request(methods, "kimi-k2", experts=fitting + 1))


@pytest.mark.parametrize(
    ("shape", "changes", "gib"),
    [
        ("32,32,4096,4096", {"tokens": (1, 1 << 20)}, 30),  # ids: 32 GiB a routing
        ("64,64,1024,1", {"tokens": (1 << 20,)}, 16),  # what it is drawn from: 24 GiB
        ("4096,128,8,1", {"tokens": (1 << 20,)}, 14),  # x and y
        ("128,4096,64,64", {"tokens": (2048,), "threads": (64,)}, 3),  # between the projections
    ],
)
def test_batches_that_do_not_fit(
    shape: str, changes: dict[str, Any], gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.system.machine.available_memory", lambda: gib << 30)
    most = max(changes["tokens"])
    with pytest.raises(UsageError, match=f"^{most:,} tokens of {shape} take .* machine has free"):
        prepare(request(["bf16"], shape, **changes))
    prepare(request(["bf16"], shape, **changes | {"tokens": (1,)}))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", FORMATS)
def test_scratch_is_foreseen(method: str, parts: int) -> None:
    """At most what the library asks for, and not many times as much."""
    for shape in ("128,256,5,2", "1024,512,3,3", "256,2048,17,1"):
        (layer,) = prepare(request([method], shape, parts=parts)).layers
        sizes = layer.shape.hidden, layer.shape.intermediate
        source, origins = RandomWeights(0, *sizes), [0] * layer.shape.experts
        experts = pack_experts(layer.method, source.expert, origins, *sizes, parts=parts)
        for threads in (1, 2, 5):
            with Pool(threads) as pool:
                for tokens in (1, 31, 2048, 5000):
                    size = experts.layer.scratch(tokens, layer.shape.top_k, pool).nbytes
                    foreseen = layer.scratch_bytes(tokens, pool)
                    assert size <= foreseen <= 4 * size + (8 << 20)


def test_what_can_be_compared_is_told_before_anything_is_measured(
    converted_example: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same keys as those of the rows that come out."""
    output = converted_example(method="int8")
    for asked in (
        request(["int4", "bf16"], "96,256,4,2", skip=True, tokens=(1, 9), threads=(1, 2)),
        request([], shapes=(), model=output, layer=1, tokens=(2,)),
    ):
        told: list[Any] = []
        rows = bench(asked, quiet, told.extend).rows
        assert told == [row.key for row in rows]
        assert {row.layer for row in rows} == {asked.layer}

    def refuse(_: Any) -> None:
        raise UsageError("nothing in common")

    monkeypatch.setattr(run, "Meter", lambda: pytest.fail("measured"))
    with pytest.raises(UsageError, match="nothing in common"):
        bench(request(), quiet, refuse)


def test_a_model_on_a_machine_without_memory(
    converted_example: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = converted_example(method="int8")
    asked = request([], shapes=(), model=output)
    monkeypatch.setattr("ktconv.system.machine.available_memory", lambda: 100 << 20)
    for read, tokens, words in (
        (1 << 30, 1, "measuring memory takes"),
        (1, 1 << 20, "1,048,576 tok"),
    ):
        monkeypatch.setattr(cases, "read_size", lambda read=read: read)
        with pytest.raises(UsageError, match=f"^{words}.* than this machine has free"):
            bench(replace(asked, tokens=(tokens,)), quiet)


def test_a_trace_that_does_not_fit_a_model(tmp_path: Path, converted_example: Converted) -> None:
    output = converted_example(method="int8")
    for ids, words in (([[0, 99]], "sends token 0 to expert 99"), ([[0, 1, 2]], "has 3 experts")):
        np.savez(tmp_path / "trace.npz", ids=np.array(ids))
        routing = parse_routing(f"trace:{tmp_path / 'trace.npz'}")
        asked = request([], shapes=(), model=output, routing=routing, top_k=2)
        with pytest.raises(UsageError, match=words) as caught:
            bench(asked, quiet)
        assert "--shape" not in f"{caught.value} {caught.value.hint}"


def test_methods_may_be_skipped_but_not_all() -> None:
    heard: list[str] = []
    rows = bench(request(["int4", "bf16"], "96,256,4,2", skip=True), heard.append).rows
    assert [row.method for row in rows] == ["bf16"]
    assert "96,256,4,2 is not supported by int4: left out" in heard
    with pytest.raises(UsageError, match="int4 does not support"):
        prepare(request(["int4"], "96,256,4,2", skip=True))


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two nodes, of which the system knows the first."""
    cpu = machine.topology()[0].number
    made = [Cpu(cpu, 0, 0), Cpu(cpu, 1, 1)]
    monkeypatch.setattr(machine, "topology", lambda: made)


@pytest.mark.usefixtures("two_nodes")
def test_weights_on_another_node_are_said(converted_example: Converted) -> None:
    heard: list[str] = []
    report = bench(request(threads=(1, 2), parts=2), heard.append)
    assert [row.local_share for row in report.rows] == [pytest.approx(0.5, abs=0.1)] * 2
    assert sum("50% of the weights' pages lie on the NUMA node" in line for line in heard) == 2
    assert not any("reshard" in line or "--numa" in line for line in heard)
    assert report.nodes is not None and set(report.nodes.read_gb_s) == {"0", "1"}
    bench(request(threads=(2,), parts=1), heard.append)
    assert any("; --numa 2 cuts them into parts" in line for line in heard)
    output = converted_example(method="int8")
    bench(request(model=output, threads=(2,)), heard.append)
    assert any("; ktconv reshard --numa 2 cuts them into parts" in line for line in heard)


def test_all_weights_are_local_on_one_node() -> None:
    if machine.numa_nodes() > 1:
        pytest.skip("this machine has several nodes")
    heard: list[str] = []
    report = bench(request(), heard.append)
    assert [row.local_share for row in report.rows] == [1.0] and report.nodes is None
    assert "one NUMA node: all memory is local" in heard
    assert not any("warning" in line for line in heard)


@pytest.mark.usefixtures("two_nodes")
def test_a_system_that_does_not_say_where_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "pages_by_node", lambda *_: None)
    heard: list[str] = []
    report = bench(request(threads=(2,), parts=2), heard.append)
    assert [row.local_share for row in report.rows] == [None]
    assert any("does not say on which NUMA nodes the weights lie" in line for line in heard)
