"""What NUMA nodes have, and sentences about machines that are made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktconv import native
from ktconv.system import machine
from ktconv.system import nodes as numa
from ktconv.system.machine import Cpu

from .test_machine import two_sockets, write


def test_facts_of_nodes(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    sizes = {"MemTotal": 900, "MemFree": 100, "Active(file)": 20, "Inactive(file)": 3, "Slab": 50}
    for node, away in ((0, "10 21"), (1, "21 10")):
        lines = [f"Node {node} {name}:     {size} kB" for name, size in sizes.items()]
        write(root / f"node/node{node}/meminfo", "\n".join(lines))
        write(root / f"node/node{node}/distance", away)
    huge = root / "node/node1/hugepages/hugepages-2048kB"
    write(huge / "nr_hugepages", "4")
    write(huge / "free_hugepages", "3")
    first, second = numa.nodes(root)
    assert (first.number, first.cpus) == (0, [0, 1, 2, 3, 8, 9, 10, 11])
    assert (first.total, first.available) == (900 * 1024, 123 * 1024)
    assert first.distances == {0: 10, 1: 21} and second.distances == {0: 21, 1: 10}
    assert (second.huge_total, second.huge_free, first.huge_total) == (8 << 20, 6 << 20, 0)


def test_nodes_of_this_machine() -> None:
    """Bounds are wide, since hypervisors that lend memory out change what a node has."""
    found = numa.nodes()
    assert 0.1 < sum(node.total for node in found) / machine.total_memory() < 1.1
    assert machine.allowed_memory() <= {node.number for node in found}


def test_cpus_count_with_the_nearest_node_that_has_memory(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    assert {cpu.node for cpu in machine.topology(root, range(16), memory=[1])} == {1}
    assert {cpu.node for cpu in machine.topology(root, range(16), memory=[0, 1])} == {0, 1}
    assert {cpu.node for cpu in machine.topology(root, range(16), memory=[7])} == {0, 1}
    write(root / "node/online", "0-2")
    write(root / "node/node2/cpulist", "3")
    write(root / "node/node0/cpulist", "0-2,8-11")
    write(root / "node/node2/distance", "31 20 10")
    assert machine.topology(root, range(16))[3].node == 1


def node(number: int, cpus: list[int], total: int = 1 << 30) -> numa.Node:
    return numa.Node(number, cpus, total, total, {}, 0, 0)


@pytest.mark.parametrize(
    ("nodes", "cpus", "wanted"),
    [
        ([node(0, [0]), node(1, [1])], [(0, 0), (1, 1)], None),
        ([node(0, [0, 1])], [(0, 0)], None),
        ([node(0, [0]), node(1, [1], 0)], [(0, 0), (1, 0)], "own memory does not exist"),
        ([node(0, [0]), node(1, [1])], [(0, 0), (1, 0)], "memory is not for this process"),
        ([node(0, [0]), node(1, [1])], [(0, 0)], "node 1 has no CPUs for this process"),
        ([node(0, [0]), node(1, [])], [(0, 0)], "node 1 has memory without CPUs"),
    ],
)  # fmt: skip
def test_sentences(nodes: list[numa.Node], cpus: list[tuple[int, int]], wanted: str | None) -> None:
    usable = [Cpu(number, of, number) for number, of in cpus]
    said = list(numa.remarks(nodes, usable, {0, 1}))
    assert len(said) == (wanted is not None)
    assert wanted is None or wanted in said[0]


def test_a_container_without_permission_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "allowed_nodes", lambda count: None)
    usable = [Cpu(0, 0, 0), Cpu(1, 1, 1)]
    (said,) = numa.remarks([node(0, [0]), node(1, [1])], usable, {0, 1})
    assert "--cap-add SYS_NICE" in said
    assert machine.allowed_memory()  # by /proc/self/status


@pytest.mark.parametrize("word", ["always", "madvise", "never"])
def test_transparent_pages(word: str, tmp_path: Path) -> None:
    words = " ".join(f"[{one}]" if one == word else one for one in ("always", "madvise", "never"))
    write(tmp_path / "enabled", words)
    assert numa.transparent_pages("enabled", tmp_path) == word
    assert numa.transparent_pages("shmem_enabled", tmp_path) == ""
