"""Memory of layers and calls: mapped pages that processes share, workspaces, what plans say."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.convert import Converted, convert
from helpers.family_list import MADE
from helpers.family_models import write

from ktconv import native
from ktconv.native import PAGE
from ktconv.runtime import MoELayer, Pool, free_workspaces, workspace
from ktconv.runtime.workspace import made
from ktconv.system.arrays import Array
from ktconv.system.nodes import HUGE_PAGE

from .conftest import HIDDEN, TOP_K, batch

Make = Callable[..., MoELayer]

CHILD = """
import sys
from pathlib import Path
from ktconv.runtime import MoELayer

layers = MoELayer.load_all(sys.argv[1])
for layer in layers.values():
    layer.touch()
sums, ours = {}, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    name, _, rest = line.partition(":")
    if "-" in name.split()[0]:
        ours = sys.argv[1] in line
    elif ours and rest.endswith("kB"):
        sums[name] = sums.get(name, 0) + 1024 * int(rest.split()[0])
print(sum(layer.weight_bytes for layer in layers.values()))
print(*(sums[name] for name in ("Rss", "Anonymous", "Private_Clean", "Private_Dirty")))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system has no smaps")
def test_processes_share_the_pages_of_an_output(converted_example: Converted, pool: Pool) -> None:
    output = converted_example(method="int8", numa=2)
    here = MoELayer.load_all(output, pool=pool)
    for layer in here.values():
        layer.touch()
    command = [sys.executable, "-c", CHILD, str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    weights, mapped, *private = map(int, done.stdout.split())
    assert weights == sum(layer.weight_bytes for layer in here.values())
    assert mapped > 0.9 * weights  # but for scales, which files do not align
    assert private[0] == 0
    assert sum(private) < 0.1 * mapped


def test_loading_an_output_reads_nothing_but_headers_and_scales(
    converted_example: Converted, pool: Pool
) -> None:
    output = converted_example(method="int8")
    tracemalloc.start()
    layers = MoELayer.load_all(output, pool=pool)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 0.3 * sum(layer.weight_bytes for layer in layers.values())


def test_replicas_take_no_memory(make_layer: Make, pool: Pool) -> None:
    gate, up, down = (np.ones(shape, np.float32) for shape in ((4, 64, 64),) * 3)
    tracemalloc.start()
    layer = MoELayer.pack(gate, up, down, "int8", slots=[2] * 64, pool=pool)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert layer.experts == 64 and layer.weight_bytes == 3 * (64 * 64 + 4 * 64)
    assert kept < 3 * layer.weight_bytes + 100_000  # as 64 copies it were 832 kB
    assert make_layer(here=[0, 0, 0]).weight_bytes == make_layer(here=[0]).weight_bytes


# ---- calls -----------------------------------------------------------------------------


def allocated(layer: MoELayer, tokens: int) -> int:
    """Bytes at most while a call runs, with the result, workspace new."""
    x, ids, weights = (array[:, : layer.hidden] for array in batch(tokens, top_k=TOP_K))
    given = np.ascontiguousarray(x), ids % layer.experts, weights
    free_workspaces(layer.pool)
    tracemalloc.start()
    y = layer(*given)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert y.dtype == np.float32
    return peak


SMALL = 20_000  # Python's own objects


@pytest.mark.parametrize("tokens", [1, 40, 2100])
def test_a_call_takes_what_was_planned(make_layer: Make, tokens: int) -> None:
    layer = make_layer()
    planned = layer.plan_bytes(tokens, TOP_K, "fp32")
    assert planned <= allocated(layer, tokens) <= planned + SMALL


def test_workspaces_end_at_the_kernels_batch(make_layer: Make) -> None:
    layer = make_layer()
    row = 4 * HIDDEN
    at = {
        tokens: layer.plan_bytes(tokens, TOP_K, "fp32") - tokens * row
        for tokens in (0, 1, 2047, 2048, 2049, 1 << 30)
    }
    assert at[0] == at[1] < at[2047] < at[2048] == at[2049] == at[1 << 30]


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Iterator[MoELayer]:
    path = tmp_path_factory.mktemp("normed")
    write(MADE["Muse-Spark"], path / "model")
    convert(path / "model", path / "out", method="int8", allow_activation_mismatch=True)
    yield MoELayer.load(path / "out", pool=pool)


@pytest.mark.parametrize("tokens", [1, 100, 900, 3000])
def test_norms_take_at_most_what_was_planned(normed: MoELayer, tokens: int) -> None:
    planned = normed.plan_bytes(tokens, TOP_K, "fp32")
    used = allocated(normed, tokens)
    assert planned / 2 < used + SMALL and used < planned + SMALL


@pytest.mark.parametrize("tokens", [1, 100, 3000])
def test_weights_on_inputs_take_at_most_what_was_planned(make_layer: Make, tokens: int) -> None:
    layer = make_layer()
    layer._packed.weight_on_input = True
    x, ids, weights = batch(tokens, top_k=1)
    free_workspaces(layer.pool)
    tracemalloc.start()
    layer(x, ids, weights)
    _, used = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = layer.plan_bytes(tokens, 1, "fp32")
    assert planned / 2 < used + SMALL and used < planned + SMALL


class TwoNodes:
    """A stand-in for a pool on two NUMA nodes that only notes which memory is bound."""

    nodes = 2

    def __init__(self) -> None:
        self.bound: list[tuple[int, int, int]] = []  # node, address, bytes

    def bind(self, memory: Array, node: int) -> None:
        self.bound.append((node, native.address_of(memory), memory.nbytes))


@pytest.mark.parametrize(
    ("size", "region"),
    [
        (1, PAGE),
        (2 * PAGE, PAGE),
        (2 * PAGE + 64, 2 * PAGE),
        (2 * HUGE_PAGE - 64, HUGE_PAGE),
        (2 * HUGE_PAGE, HUGE_PAGE),
        (2 * HUGE_PAGE + 64, 2 * HUGE_PAGE),
        (9 * HUGE_PAGE, 5 * HUGE_PAGE),
    ],
)
def test_nodes_have_the_regions_that_their_teams_use(size: int, region: int) -> None:
    """Which the kernels cut in whole pages from what they are given."""
    pool = TwoNodes()
    memory = made(pool, size)  # type: ignore[arg-type]
    start = native.address_of(memory)
    assert memory.nbytes == 2 * region and start % 64 == 0
    assert pool.bound == [(0, start, region), (1, start + region, region)]


def test_tasks_of_streams_have_such_memory(
    make_layer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows with the largest task only."""
    asked: list[tuple[Pool, int]] = []

    def record(pool: Pool, size: int) -> Array:
        asked.append((pool, size))
        return made(pool, size)

    monkeypatch.setattr(workspace, "made", record)
    with Pool(1) as pool:
        layer = MoELayer(make_layer()._packed, pool)
        for tokens in (2, 9, 3):
            x, ids, weights = batch(tokens)
            layer.task(f"{tokens} tokens", x, ids, weights, np.empty_like(x), skip=None)
        sizes = [layer._packed.layer.scratch_size(tokens, TOP_K, pool) for tokens in (2, 9)]
    assert asked == [(pool, size) for size in sizes]
