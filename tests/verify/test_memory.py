"""Memory of verify: bounded whatever the size of the model, announced, and as --max-memory says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import process
from helpers.convert import Converted, convert
from helpers.families import (
    bf16,
    file_bytes,
    numbered,
    random_weights,
    raw,
    simple_config,
    write_checkpoint,
)
from helpers.paths import EXAMPLE
from msgspec.structs import replace
from numpy.typing import NDArray
from threadpoolctl import threadpool_info

from ktconv.errors import MemoryLimitError, ResourceError
from ktconv.formats import PROJECTIONS
from ktconv.runtime.layers import experts as moe_experts
from ktconv.runtime.layers import open_experts
from ktconv.source import open_checkpoint
from ktconv.source.reading import streamed
from ktconv.source.reading.streamed import Piece, Streamed
from ktconv.source.reading.tensors import SourceTensors
from ktconv.system import machine
from ktconv.verify import Request, layers, prepare, verify
from ktconv.verify.hidden_states import Inputs
from ktconv.verify.layers import LayerReference, Outputs
from ktconv.verify.memory import (
    DEFAULT_MEMORY,
    LayerNeed,
    Need,
    plan_memory,
)

pytestmark = [pytest.mark.slow, pytest.mark.process]

MIB = 1 << 20
HIDDEN, INNER = 512, 512
PACKED = 3 * HIDDEN * INNER  # bytes of an expert in INT8


def model_of(directory: Path, experts: int) -> Path:
    """A layer of that many experts, all with the same weights, and its router."""
    one = numbered("model.layers.0.mlp.experts", random_weights(HIDDEN, INNER, 1))
    router = bf16(np.random.default_rng(1).standard_normal((experts, HIDDEN)))
    tensors = {"model.layers.0.mlp.gate.weight": router} | {
        name.replace("experts.0.", f"experts.{expert}."): raw(tensor)
        for expert in range(experts)
        for name, tensor in one.items()
    }
    config = simple_config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=experts,
        num_experts_per_tok=min(8, experts),
        norm_topk_prob=True,
    )
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        shape = list(tensor.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [start, end]}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(file_bytes(json.dumps(header).encode()))
        file.writelines(tensor.data for tensor in tensors.values())
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """64 experts, 96 MiB in bf16, and their conversion to INT8."""
    directory = tmp_path_factory.mktemp("memory")
    model = model_of(directory / "model", 64)
    convert(model, directory / "out", method="int8", experts_only=True)
    return model, directory / "out"


def measured(output: Path, model: Path, *words: object) -> dict[str, Any]:
    done = process("verify", output, "--source", model, "--threads", 1, "--json", *words)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["peak_rss_bytes"] <= facts["peak_memory_bytes"]
    return facts


# ---- processes ---------------------------------------------------------------------------


def test_level_weights_needs_the_same_for_any_number_of_experts(
    large: tuple[Path, Path], tmp_path: Path
) -> None:
    """Packed matrices once stayed in memory until the cyclic collector ran."""
    model = model_of(tmp_path / "model", 4)
    convert(model, tmp_path / "out", method="int8", experts_only=True)
    few = measured(tmp_path / "out", model, "--level", "weights")["peak_rss_bytes"]
    many = measured(large[1], large[0], "--level", "weights")["peak_rss_bytes"]
    assert many - few < 10 * PACKED, "60 more experts"


def smallest_limit(output: Path, model: Path, *words: object) -> int:
    """The MiB that a refused verification asks for.

    They include what the interpreter and its libraries take, which differs between machines.
    """
    words = ("verify", output, "--source", model, "--threads", 1, *words)
    done = process(*words, "--max-memory", "1MB")
    assert done.returncode == 3 and done.stdout == ""
    assert "--max-memory 1.0 MB is too small: this verification needs" in done.stderr
    needed = re.search(r"--max-memory ([0-9]+)MiB", done.stderr)
    assert needed is not None
    return int(needed[1])


def test_level_layers_stays_below_the_limit(large: tuple[Path, Path]) -> None:
    """Every level of the kernels, on a few experts at a time; in float32 they have 192 MiB."""
    model, output = large
    limit = smallest_limit(output, model, "--level", "layers") + 4
    assert limit < 192
    facts = measured(output, model, "--level", "layers", "--max-memory", f"{limit}MiB")
    assert facts["peak_rss_bytes"] <= limit * MIB
    (row,) = facts["layers"]["layers"]
    assert row["experts_run"] > 32 and row["routing"] == "router"
    assert all(0 < error < 0.005 for error in row["kernel_error"].values())


def test_what_is_needed_is_announced_before_work(large: tuple[Path, Path]) -> None:
    model, output = large
    words = ("--level", "weights", "--sample", "0.1", "--json")
    done = process("verify", output, "--source", model, *words)
    facts = json.loads(done.stdout)
    announced = re.search(r"memory: up to ([0-9.]+ [kMG]B) with ([0-9]+) thread", done.stderr)
    assert announced is not None and int(announced[2]) == facts["threads"]
    assert done.stderr.index("memory:") < done.stderr.index("done,")


def test_too_small_a_limit_is_refused_with_the_number_that_is_needed(
    large: tuple[Path, Path],
) -> None:
    model, output = large
    limit = f"{smallest_limit(output, model) + 4}MiB"
    measured(output, model, "--max-memory", limit, "--sample", "0.1")


def test_memory_of_comparing_two_conversions(large: tuple[Path, Path], tmp_path: Path) -> None:
    model, output = large
    convert(model, tmp_path / "out", method="int4", experts_only=True)
    words = ("verify", output, tmp_path / "out", "--sample", "0.1", "--threads", 1, "--max-memory")
    done = process(*words, "1MB")
    assert done.returncode == 3 and "is too small: this verification needs" in done.stderr
    done = process(*words, "400MB", "--json")
    facts = json.loads(done.stdout)
    assert facts["verdict"] == "different"
    assert facts["peak_rss_bytes"] <= facts["peak_memory_bytes"] <= 400_000_000


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_level_model_is_refused_before_anything_is_read(
    converted_example: Converted,
) -> None:
    output = converted_example(method="int8")
    request = Request(output, str(EXAMPLE), "model", threads=1, windows=2)
    peak = prepare(request).budget.peak
    limit = machine.resident_memory() + MIB
    with pytest.raises(MemoryLimitError, match="layer by layer needs") as caught:
        prepare(replace(request, max_memory=limit))
    assert "--max-memory" in str(caught.value.hint)
    assert machine.resident_memory() < peak


# ---- portions ----------------------------------------------------------------------------


@pytest.fixture
def machine_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "resident_memory", lambda: 100 * MIB)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 64)


LARGE = LayerNeed(fixed=50 * MIB, thread=40 * MIB, expert=44 * MIB, experts=384)


@pytest.mark.usefixtures("machine_of_64")
def test_a_large_layer_is_done_in_portions() -> None:
    """Each thread has an expert of its own; packed weights fill what is left."""
    budget = plan_memory(Need(13 * MIB, LARGE), None, None, "no torch")
    assert budget.peak <= 100 * MIB + DEFAULT_MEMORY
    assert budget.threads == 64 and budget.layer_threads > 4
    assert budget.experts_at_once(44 * MIB) >= budget.layer_threads


@pytest.mark.usefixtures("machine_of_64")
def test_a_small_layer_runs_at_once() -> None:
    small = LayerNeed(MIB, MIB, MIB, 128)
    budget = plan_memory(Need(12 * MIB, small), None, 2, "no torch")
    assert (budget.threads, budget.layer_threads) == (2, 2)
    assert budget.experts_at_once(MIB) == 128


@pytest.mark.usefixtures("machine_of_64")
@pytest.mark.parametrize("threads", [None, 3])
def test_the_smallest_limit(threads: int | None) -> None:
    need = Need(13 * MIB, LARGE)
    with pytest.raises(MemoryLimitError) as caught:
        plan_memory(need, 50 * MIB, threads, "no torch")
    needed = re.search(r"--max-memory ([0-9]+)MiB", str(caught.value.hint))
    assert needed is not None
    budget = plan_memory(need, int(needed[1]) * MIB, threads, "no torch")
    assert budget.peak <= int(needed[1]) * MIB
    assert (budget.threads, budget.experts_at_once(44 * MIB)) == (threads or 1, 1)
    with pytest.raises(ResourceError):
        plan_memory(need, int(needed[1]) * MIB - 2 * MIB, threads, "no torch")


@pytest.mark.usefixtures("machine_of_64")
def test_the_default_refuses_nothing() -> None:
    """Where the smallest portions need more, that is announced."""
    need = Need(13 * MIB, LayerNeed(2 << 30, 1 << 30, 1 << 30, 4))
    assert plan_memory(need, None, 8, "no torch").peak > 4 << 30


@pytest.mark.usefixtures("machine_of_64")
def test_the_source_model_is_loaded_only_where_it_fits() -> None:
    need = Need(12 * MIB, LayerNeed(MIB, MIB, MIB, 8), capture=3 << 30)
    why = plan_memory(need, None, 1, None).why_not_captured
    assert why is not None and "--max-memory" in why
    budget = plan_memory(need, 4 << 30, 1, None)
    assert budget.why_not_captured is None and 3 << 30 < budget.peak <= 4 << 30
    assert plan_memory(need, 4 << 30, 1, "no torch").why_not_captured == "no torch"


# ---- a few rows and experts at a time ----------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 128 rows, blocks of three tokens."""
    monkeypatch.setattr(streamed, "PIECE_BYTES", 1)
    monkeypatch.setattr(moe_experts, "TOKENS_AT_ONCE", 3)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_pieces_cover_a_packed_matrix_once(method: str, numa: int, tmp_path: Path) -> None:
    hidden, inner = 384, 512
    config = simple_config(hidden_size=hidden, moe_intermediate_size=inner, num_experts=2)
    tensors = numbered("model.layers.0.mlp.experts", random_weights(hidden, inner, 2))
    model = write_checkpoint(tmp_path / "model", tensors, config)
    convert(model, tmp_path / "out", method=method, numa=numa)
    experts = open_experts(tmp_path / "out")
    for matrix, shape in zip(experts.streams(1), experts.loaded(1), strict=True):
        assert matrix is not None and shape is not None
        seen = np.zeros((matrix.rows, matrix.cols), int)
        for piece in matrix.pieces():
            assert piece.values.shape[0] <= 128
            seen[piece.rows, piece.cols] += 1
        assert (seen == 1).all() and shape.values().shape == seen.shape
    x = np.random.default_rng(3).standard_normal((7, hidden), np.float32)
    plain, rounded = experts.outputs(experts.streams(1), x)
    # Sums in another order move some of the values that are rounded in between to the next level.
    for streamed_y, flag, bound in ((plain, False, 1e-5), (rounded, True, 2e-3)):
        expected = experts.output(experts.loaded(1), x, rounded=flag)
        assert np.linalg.norm(streamed_y - expected) <= bound * np.linalg.norm(expected)


def test_a_product_holds_two_pieces_at_most() -> None:
    """The one it uses, and the next while that is made."""
    alive, most = 0, 0

    class Counted(np.ndarray):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def pieces() -> Iterator[Piece]:
        nonlocal alive, most
        for row in range(20):
            values = np.ones((1, 4), np.float32).view(Counted)
            alive += 1
            most = max(most, alive)
            yield Piece(slice(row, row + 1), slice(0, 4), values)

    x = np.ones((2, 4), np.float32)
    assert (Streamed(20, 4, pieces).product(x) == 4).all()
    assert most <= 2


def test_no_more_experts_at_once_than_threads() -> None:
    """And no more results than one beside them, and the one that is added up."""
    lock, running, most = threading.Lock(), 0, 0
    started: list[int] = []
    total: LayerReference

    def compute(expert: int, x: NDArray[np.float32]) -> Outputs:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            started.append(expert)
            assert len(started) - len(total.errors) <= 3 + 2, "results that nobody took"
        y = x * np.float32(expert)
        with lock:
            running -= 1
        return Outputs(y, y, y)

    ids = np.arange(40).reshape(20, 2)
    inputs = Inputs(np.zeros((20, 8), np.uint16), ids, np.ones(ids.shape, np.float32), "random")
    total = LayerReference(np.ones((20, 8), np.float32), compute, threads=3)
    together = total.add(inputs)
    assert most <= 3 and sorted(started) == list(range(40))
    assert (together == ids.sum(axis=1)[:, None]).all()


def test_an_error_in_a_thread_ends_it() -> None:
    def compute(expert: int, x: NDArray[np.float32]) -> Outputs:
        raise ResourceError(f"expert {expert} cannot be read")

    ids = np.arange(8).reshape(4, 2)
    inputs = Inputs(np.zeros((4, 8), np.uint16), ids, np.ones(ids.shape, np.float32), "random")
    with pytest.raises(ResourceError, match="expert 0 cannot be read"):
        LayerReference(np.ones((4, 8), np.float32), compute, threads=2).add(inputs)


@pytest.mark.usefixtures("tiles", "small_pieces")
def test_groups_of_experts_give_what_the_whole_layer_gives(
    large: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels run on one expert after the other; its pages are given back each time."""
    from ktconv.verify import hidden_states, memory

    model, output = large
    monkeypatch.setattr(hidden_states, "find_spec", lambda name: None)
    request = Request(output, str(model), "layers", sample=0.01, tokens=4, threads=2)
    (together,) = verify(request).facts["layers"]["layers"]
    ran: list[int] = []
    released: list[int] = []
    forward = moe_experts.Experts.forward

    def counting(self: Any, x: Any, ids: Any, *others: Any) -> Any:
        ran.append(len(np.unique(ids[ids >= 0])))
        return forward(self, x, ids, *others)

    monkeypatch.setattr(moe_experts.Experts, "forward", counting)
    monkeypatch.setattr(memory.Budget, "experts_at_once", lambda self, size: 1)
    monkeypatch.setattr("ktconv.runtime.memory.Mapped.release", lambda self: released.append(1))
    result = verify(request)
    (apart,) = result.facts["layers"]["layers"]
    assert result.passed and set(ran) == {1}
    levels = len(result.facts["layers"]["isas"])
    assert len(released) * levels == len(ran) == apart["experts_run"] * levels
    assert apart["worst_expert"]["expert"] == together["worst_expert"]["expert"]
    for name in ("quantization_error", "weights_error"):
        assert apart[name] == pytest.approx(together[name], rel=0.02)


def test_pages_of_mapped_experts_are_given_back(large: tuple[Path, Path]) -> None:
    _, output = large
    experts = open_experts(output)
    for expert in range(64):
        list(experts.streams(expert)[1].pieces())
    before = machine.resident_memory()
    experts.release()
    assert before - machine.resident_memory() > 64 * HIDDEN * INNER // 2
    assert np.isfinite(experts.loaded(0)[1].values()).all()


# ---- tensors beside the experts ----------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
def test_source_tensors_of_every_encoding(tmp_path: Path) -> None:
    from helpers.families import Raw, fp8

    from ktconv.formats.decode import e4m3fn_to_f32

    rng = np.random.default_rng(4)
    codes = rng.integers(0, 120, (300, 200), np.uint8)
    scale = rng.random((3, 2), np.float32) + 0.5
    half, single = rng.random((5, 6)).astype(np.float16), rng.random(9, np.float32)
    tensors = numbered("model.layers.0.mlp.experts", random_weights()) | {
        "fp8": fp8(codes),
        "fp8_scale_inv": scale,
        "alone": fp8(codes),
        "half": half,
        "single": single,
        "integers": Raw("I32", (2, 2), bytes(16)),
    }
    config = simple_config(
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    model = write_checkpoint(tmp_path / "model", tensors, config)
    source = SourceTensors(open_checkpoint(model))

    def tensor(name: str) -> Any:
        found = source.find([f"no {name}", name])
        assert found is not None
        return found

    expected = e4m3fn_to_f32(codes) * scale.repeat(128, 0)[:300].repeat(128, 1)[:, :200]
    assert np.array_equal(source.matrix(tensor("fp8")).values(), expected)
    assert np.array_equal(source.matrix(tensor("half")).values(), half.astype(np.float32))
    assert np.array_equal(source.vector(tensor("single")), single)
    for name in ("alone", "integers"):
        with pytest.raises(Exception, match=f"{name} (is|has dtype) "):
            source.matrix(tensor(name))
    assert source.find(["nothing"]) is None
    matrices = source.expert(open_checkpoint(model).layers[0], 0)
    assert [matrix.rows for matrix in matrices if matrix] == [128 for _ in PROJECTIONS]


# ---- BLAS --------------------------------------------------------------------------------


def test_blas_has_one_thread_while_ours_share_the_work(
    large: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own threads spin while they wait for one another."""
    model, output = large
    before, compute = blas_threads(), moe_experts.in_blocks
    during: list[set[int]] = []

    def noticed(*arguments: Any) -> Any:
        during.append(blas_threads())
        return compute(*arguments)

    monkeypatch.setattr(layers, "in_blocks", noticed)
    assert verify(Request(output, str(model), level="layers")).passed
    assert during and all(threads <= {1} for threads in during)
    assert blas_threads() == before


def blas_threads() -> set[int]:
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}
