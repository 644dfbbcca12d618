"""Where weights of a layer lie: mapped, copied, shared; on machines with several nodes that are
made up here. `make numa` boots emulated ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import Converted
from helpers.paths import EXAMPLE

from ktconv import native
from ktconv.errors import ResourceError, UsageError
from ktconv.formats import FORMATS
from ktconv.native import Gathered
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.layers.blocks import Block, part_shapes
from ktconv.runtime.memory import needs
from ktconv.runtime.memory.needs import part_nodes, readers
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.system import blocks, machine
from ktconv.system import nodes as numa
from ktconv.system.machine import Cpu

from .conftest import batch

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="session")
def output(converted_example: Converted) -> Path:
    return converted_example(method="int8", numa=2)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Two threads, of which the second runs on a node that the system does not know."""
    cpu = machine.topology()[0].number
    made = [Cpu(cpu, 0, 0), Cpu(cpu, 1, 1)]
    monkeypatch.setattr(machine, "topology", lambda: made)
    with Pool(2) as pool:
        assert pool.os_nodes == [0, 1] and pool.placed
        yield pool


def answer(layer: MoELayer) -> Any:
    x, ids, weights = batch()
    rows = np.ascontiguousarray(np.resize(x, (len(x), layer.hidden)))
    return layer(rows, ids, weights)


@pytest.mark.parametrize("memory", ["auto", "map", "copy", "shared"])
def test_the_same_bits_wherever_weights_lie(output: Path, pool: Pool, memory: str) -> None:
    layer = MoELayer.load(output, memory=memory, pool=pool)
    assert (answer(layer) == answer(MoELayer.load(output, pool=pool))).all()
    found = layer.memory
    assert found.kind == ("map" if memory == "auto" else memory)
    assert found.nbytes == layer.weight_bytes
    assert found.local_share == 1.0 and not found.note
    assert 0 <= found.huge_bytes <= found.nbytes


@pytest.mark.parametrize("memory", ["copy", "shared"])
def test_the_pages_of_files_are_given_back_once(
    output: Path, pool: Pool, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each tensor it takes several times as long as reading."""
    given: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def record(fd: int, offset: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            given.append((offset, size))
        advise(fd, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    layer = MoELayer.load(output, memory=memory, pool=pool)
    (size,) = (size for _, size in given if size > 2 * native.PAGE)  # scales are read alone, too
    assert layer.weight_bytes <= size < 1.1 * layer.weight_bytes + native.PAGE


@pytest.mark.parametrize("memory", ["copy", "shared"])
def test_copies_lie_on_reserved_pages(output: Path, pool: Pool, memory: str) -> None:
    """Where enough are free; `make numa` reserves some."""
    if blocks.reserved_free(None) < 4 * numa.HUGE_PAGE:
        pytest.skip("no huge pages are reserved (/proc/sys/vm/nr_hugepages)")
    found = MoELayer.load(output, memory=memory, pool=pool).memory
    assert found.reserved_bytes == found.huge_bytes == found.nbytes
    assert "on reserved huge pages" in str(found)


def of_a_layer() -> list[Any]:
    fmt = FORMATS["int8"]
    return [Block(fmt, part_shapes(1024, 512, gated=True), 8).memory]


def of_a_worker() -> list[Any]:
    made = Buffers(BufferSizes(source=12 << 20, packed=3 << 20, scratch_cols=4096))
    return [made.source, made.bounce, made.packed, made.readback, made.scratch]


@pytest.mark.parametrize("make", [of_a_layer, of_a_worker])
def test_memory_is_new(make: Callable[[], list[Any]]) -> None:
    """It comes from the node of who writes to it, and malloc's may lie elsewhere from before."""
    for _ in range(4):  # of these malloc keeps one for the next who asks
        np.ones(20 << 20, np.uint8)
    arrays = make()
    found = native.pages_by_node(native.Ranges(arrays), 64)
    if found is None:
        pytest.skip("the system does not say where pages lie")
    assert sum(found[0]) == 0 and found[1] >= sum(one.nbytes // native.PAGE - 1 for one in arrays)
    assert all(native.address_of(one) % 64 == 0 for one in arrays)
    for one in arrays:
        one[:] = 1


def test_shared_memory_is_mapped_at_once() -> None:
    """So that what lies on huge pages is told before the first call."""

    def fill(memory: Any) -> None:
        memory[0][:] = 1

    block = blocks.shared_block("test-mapped", [2 * numa.HUGE_PAGE], [None], fill)
    found = native.pages_by_node(native.Ranges([block]), 64)
    if found is None:
        pytest.skip("the system does not say where pages lie")
    assert sum(found[0]) == block.nbytes // native.PAGE and found[1] == 0


def test_copies_do_not_need_their_files(output: Path, pool: Pool, tmp_path: Path) -> None:
    shutil.copytree(output, tmp_path / "out")
    layer = MoELayer.load(tmp_path / "out", memory="copy", pool=pool)
    wanted = answer(MoELayer.load(output, pool=pool))
    for file in (tmp_path / "out").glob("*.safetensors"):
        os.truncate(file, 100)  # mapped pages would end the process with SIGBUS
    assert (answer(layer) == wanted).all()


def test_a_copy_of_some_slots_has_no_others(output: Path, pool: Pool) -> None:
    layer = MoELayer.load(output, memory="copy", slots=[5, 0, 5], pool=pool)
    mapped = MoELayer.load(output, slots=[5, 0, 5], pool=pool)
    x, _, weights = batch(top_k=2)
    rows = np.ascontiguousarray(np.resize(x, (len(x), layer.hidden)))
    ids = np.array([[0, 1], [2, 1], [1, 0], [2, -1], [0, 2]])
    assert (layer(rows, ids, weights) == mapped(rows, ids, weights)).all()
    assert layer.memory.nbytes == layer.weight_bytes


def test_memory_words(output: Path, pool: Pool) -> None:
    with pytest.raises(UsageError, match="memory 'there' is not known"):
        MoELayer.load(output, memory="there", pool=pool)
    with pytest.raises(UsageError, match='memory "shared" is for converted models'):
        MoELayer.load(EXAMPLE, memory="shared", pool=pool)
    assert MoELayer.load(EXAMPLE, memory="copy", pool=pool).memory.kind == "copy"


def test_plans(output: Path, pool: Pool, two_nodes: Pool) -> None:
    layers = MoELayer.load_all(output, pool=pool)
    (one,) = MoELayer.plan_load(output, 1, pool=pool).items()
    assert one[0] is None and layers[1].weight_bytes <= one[1] < layers[1].weight_bytes + (4 << 20)
    with pytest.raises(UsageError, match="has no experts of layer 7"):
        MoELayer.plan_load(output, 7, pool=pool)
    every = MoELayer.plan_load(output, pool=two_nodes)
    assert sorted(every, key=str) == [0, 1] and every[0] == every[1] == len(layers) * (2 << 20)


def test_too_little_memory_is_an_error(
    output: Path, two_nodes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = [numa.Node(n, [n], 1 << 40, free, {}, 0, 0) for n, free in ((0, 1 << 40), (1, 1000))]
    monkeypatch.setattr(needs, "nodes", lambda: tight)
    for load in (MoELayer.load, MoELayer.load_all):
        with pytest.raises(ResourceError, match=r"on NUMA node 1, which has 1.0 kB free") as error:
            load(output, memory="copy", pool=two_nodes)
        assert 'memory="map"' in (error.value.hint or "")
    monkeypatch.setattr(needs, "nodes", list)
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(ResourceError, match=r"but 1\.0 kB are free"):
        MoELayer.load(output, memory="shared", pool=two_nodes)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = MoELayer.load(output, pool=two_nodes)
    assert layer.memory.kind == "map"
    assert "a copy takes" in str(said[0].message) and "speed suffers" in str(said[0].message)


def test_pages_that_cannot_be_moved_are_copied(output: Path, two_nodes: Pool) -> None:
    """Node 1 does not exist here, so the system moves nothing to it."""
    if part_nodes(2, two_nodes) != [0, 1]:
        pytest.fail("parts are not computed by both nodes")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = MoELayer.load(output, pool=two_nodes)
    assert layer.memory.kind == "copy"
    assert len(said) == 1 and str(said[0].message) == layer.memory.note
    assert "lie on another NUMA node than the one that computes them" in layer.memory.note
    assert layer.memory.local_share is not None
    assert 0.3 < layer.memory.local_share < 0.7  # of node 0: the other half cannot be right
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = MoELayer.load(output, pool=two_nodes, memory="map")
    assert layer.memory.kind == "map" and "speed suffers" in str(said[0].message)


def test_pages_are_gathered_by_node(
    output: Path, two_nodes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page of a part once, and no page of another part."""
    asked: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    def gather(ranges: native.Ranges, node: int) -> Gathered:
        asked[node] += ranges.spans
        return Gathered(10, 10)

    monkeypatch.setattr(native, "gather_pages", gather)
    layer = MoELayer.load(output, pool=two_nodes).packed.layer
    for part in (0, 1):
        wanted = native.Ranges(layer.arrays(part))
        assert sum(end - begin for begin, end in asked[part]) == wanted.nbytes
        spans = sorted(asked[part])
        assert spans[0][0] == wanted.spans[0][0] and spans[-1][1] == wanted.spans[-1][1]


def test_fewer_parts_than_nodes_is_said(converted_example: Converted, two_nodes: Pool) -> None:
    output = converted_example(method="int8")
    with pytest.warns(UserWarning, match="is cut into 1 part, but threads of 2 NUMA nodes"):
        layer = MoELayer.load(output, pool=two_nodes)
    assert part_nodes(1, two_nodes) == [None]
    layer.touch()  # all is on node 0, where one of the two threads is
    assert layer.memory.pages > 100 and layer.memory.local_share == pytest.approx(0.5, abs=0.01)


def test_threads_that_are_not_placed_read_from_all_nodes(output: Path, two_nodes: Pool) -> None:
    with Pool(1) as pool:
        assert not pool.placed and readers(2, pool) == [{0: 0.5, 1: 0.5}] * 2
        layer = MoELayer.load(output, pool=pool)
        assert layer.memory.pages == 0 and layer.memory.local_share is None  # nothing was read
        layer.touch()
        assert layer.memory.local_share == pytest.approx(0.5, abs=0.01)


def test_shares_of_nodes_with_different_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = machine.topology()[0].number
    made = [Cpu(cpu, node, core) for core, node in enumerate([0, 0, 0, 2, 5])]
    monkeypatch.setattr(machine, "topology", lambda: made)
    with Pool(5) as pool:
        assert pool.threads_of == [3, 1, 1]
        assert readers(1, pool) == [{0: 0.6, 2: 0.2, 5: 0.2}]
        assert readers(2, pool) == [{0: 0.75, 2: 0.25}, {5: 1.0}]
        assert readers(4, pool) == [{0: 1.0}, {0: 1.0}, {2: 1.0}, {5: 1.0}]


@pytest.mark.parametrize(
    ("parts", "count", "wanted"),
    [
        (2, 2, [0, 1]), (4, 2, [0, 0, 1, 1]), (1, 2, [None]), (2, 3, [None, 2]), (3, 2, [0, 0, 1]),
        (2, 4, [None, None]),
    ],
)  # fmt: skip
def test_nodes_of_parts(
    parts: int, count: int, wanted: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the threads of several nodes compute a part together."""
    made = [Cpu(machine.topology()[0].number, node, node) for node in range(count)]
    monkeypatch.setattr(machine, "topology", lambda: made)
    with Pool(count) as pool:
        assert part_nodes(parts, pool) == wanted


# ---- shared by processes -----------------------------------------------------------------

CHILD = """
import sys
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.layers.blocks import Block, part_shapes
layer = MoELayer.load(sys.argv[1], memory="shared", pool=Pool(1))
print(layer.memory.kind, flush=True)
sys.stdin.read()
"""


def shared_files() -> set[Path]:
    return set(blocks._folder().glob(f"ktconv-{os.geteuid()}-*"))


def resident(name: str) -> int:
    """kB of the machine's memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(blocks, "REGISTRY", tmp_path)
    return tmp_path


def test_processes_share_a_copy(output: Path, pool: Pool) -> None:
    before = shared_files()
    command = [sys.executable, "-c", CHILD, str(output)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "shared\n"
        (file,) = shared_files() - before
        layer = MoELayer.load(output, memory="shared", pool=pool)
        users = blocks._users(os.open(file, os.O_RDONLY))
        assert sorted(user[0] for user in users) == sorted([child.pid, os.getpid()])
        assert len({user[3] for user in users}) == 1  # the same memory
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert (answer(layer) == answer(MoELayer.load(output, pool=pool))).all()
    again = MoELayer.load(output, memory="shared", pool=pool)
    assert len(blocks._users(os.open(file, os.O_RDONLY))) == 2  # both of this process
    del layer, again
    assert shared_files() == before


def test_files_of_killed_processes_are_removed(registry: Path) -> None:
    stale = registry / f"ktconv-{os.geteuid()}-stale"
    stale.write_text("[[999999999, 3, 1, 1, 4096]]")
    half = registry / f"ktconv-{os.geteuid()}-half"
    half.write_text("[[12")
    block = blocks.shared_block("key", [2 << 20], [None], lambda pieces: pieces[0].fill(7))
    assert (block == 7).all() and not block.flags.writeable
    assert [path.name for path in registry.iterdir()] == [f"ktconv-{os.geteuid()}-key"]
    del block
    assert list(registry.iterdir()) == []


def test_a_failure_while_filling_leaves_nothing(registry: Path) -> None:
    def fail(_: Any) -> None:
        raise ResourceError("no")

    with pytest.raises(ResourceError, match="no"):
        blocks.shared_block("key", [2 << 20], [None], fail)
    assert list(registry.iterdir()) == []
    block = blocks.shared_block("key", [2 << 20], [None], lambda pieces: pieces[0].fill(1))
    assert (block == 1).all()


def test_a_file_of_another_user_is_refused(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    (registry / f"ktconv-{own + 1}-key").touch()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ResourceError, match="belongs to another user"):
        blocks.shared_block("key", [2 << 20], [None], lambda pieces: None)


def test_reserved_pages_that_are_not_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose limit of huge pages is 0: the system says that some are free."""
    monkeypatch.setattr(blocks, "reserved_free", lambda node: 1 << 40)
    block = blocks.private_block(5000, None)
    block[:] = 1
    assert len(block) == 5000
