"""Which CPUs, cores and nodes there are, read from made-up machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktconv.errors import UsageError
from ktconv.system import machine
from ktconv.system.machine import Cpu


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_system(
    root: Path, nodes: dict[int, str], siblings: dict[int, str], online: str, memory: str
) -> Path:
    """The files that the kernel would show: CPUs of each node, siblings of each CPU."""
    write(root / "cpu/online", online)
    write(root / "node/online", ",".join(map(str, nodes)))
    write(root / "node/has_normal_memory", memory)
    for node, cpus in nodes.items():
        write(root / f"node/node{node}/cpulist", cpus)
    for cpu, text in siblings.items():
        write(root / f"cpu/cpu{cpu}/topology/thread_siblings_list", text)
    return root


def two_sockets(root: Path, online: str = "0-15") -> Path:
    """Two nodes of four cores with two threads each, numbered as Intel servers do."""
    siblings = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    return make_system(root, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings, online, "0-1")


def test_two_sockets(tmp_path: Path) -> None:
    cpus = machine.topology(two_sockets(tmp_path), range(16))
    assert cpus[5] == Cpu(5, 1, 5)
    assert cpus[13] == Cpu(13, 1, 5)
    assert machine.usable_cores(cpus) == 8
    place = machine.placement(cpus=cpus)
    assert place.threads == 8
    assert place.cpus == [0, 1, 2, 3, 4, 5, 6, 7]
    assert place.nodes == [0] * 4 + [1] * 4
    assert place.os_nodes == [0, 1]


def test_siblings_come_last(tmp_path: Path) -> None:
    """Neighbouring numbers are one core here, as on many desktops."""
    siblings = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}
    root = make_system(tmp_path, {0: "0-3", 1: "4-7"}, siblings, "0-7", "0-1")
    cpus = machine.topology(root, range(8))
    assert machine.placement(cpus=cpus).cpus == [0, 2, 4, 6]
    assert machine.placement(6, cpus=cpus).cpus == [0, 2, 1, 4, 6, 5]
    assert machine.placement(10, cpus=cpus).cpus == [0, 2, 1, 3, 0, 4, 6, 5, 7, 4]


def test_offline_cpus(tmp_path: Path) -> None:
    cpus = machine.topology(two_sockets(tmp_path, "0-2,4-7,12"), range(16))
    assert [cpu.number for cpu in cpus] == [0, 1, 2, 4, 5, 6, 7, 12]
    place = machine.placement(cpus=cpus)
    assert place.threads == 7
    assert place.cpus == [0, 1, 2, 4, 5, 6, 7]
    assert place.nodes == [0, 0, 0, 1, 1, 1, 1]


def test_cpuset_on_one_node(tmp_path: Path) -> None:
    """A container with CPUs of the second socket only: one node, whatever its number."""
    cpus = machine.topology(two_sockets(tmp_path), {5, 6, 13})
    place = machine.placement(cpus=cpus)
    assert (place.threads, place.cpus, place.nodes, place.os_nodes) == (2, None, None, [1])


def test_cpuset_on_both(tmp_path: Path) -> None:
    cpus = machine.topology(two_sockets(tmp_path), {3, 9, 11, 15})
    place = machine.placement(cpus=cpus)
    assert place.threads == 3  # 3 and 11 are one core
    assert place.cpus == [3, 9, 15]
    assert place.nodes == [0, 0, 1]


def test_named_nodes(tmp_path: Path) -> None:
    """By the system's numbers, in any order; one node of several has CPUs of its own, too."""
    cpus = machine.topology(two_sockets(tmp_path), range(16))
    assert machine.placement(nodes=[1, 0], cpus=cpus) == machine.placement(cpus=cpus)
    place = machine.placement(3, nodes=[1, 1], cpus=cpus)
    assert (place.cpus, place.nodes, place.os_nodes) == ([4, 5, 6], [0, 0, 0], [1])
    assert machine.placement(3, nodes=1, cpus=cpus).cpus is None
    only = [Cpu(0, 0, 0), Cpu(1, 0, 1)]
    assert machine.placement(nodes=[0], cpus=only) == machine.placement(cpus=only)
    with pytest.raises(UsageError, match="no NUMA node 2") as refused:
        machine.placement(nodes=[0, 2], cpus=cpus)
    assert refused.value.hint == "it has 0, 1"
    with pytest.raises(UsageError, match="empty list"):
        machine.placement(nodes=[], cpus=cpus)


def test_nodes_keep_their_numbers(tmp_path: Path) -> None:
    root = make_system(tmp_path, {0: "0", 3: "1"}, {0: "0", 1: "1"}, "0-1", "0,3")
    place = machine.placement(cpus=machine.topology(root, range(2)))
    assert (place.nodes, place.os_nodes) == ([0, 1], [0, 3])


def test_a_node_without_memory(tmp_path: Path) -> None:
    root = make_system(tmp_path, {0: "0", 1: "1"}, {}, "0-1", "1")
    cpus = machine.topology(root, range(2))
    assert [cpu.node for cpu in cpus] == [1, 1]
    assert machine.placement(cpus=cpus).os_nodes == [1]


def test_nothing_to_read(tmp_path: Path) -> None:
    cpus = machine.topology(tmp_path, {0, 2})
    assert cpus == [Cpu(0, 0, 0), Cpu(2, 0, 2)]
    assert machine.placement(cpus=cpus) == machine.Placement(2, None, None, [0])


def test_damaged_files(tmp_path: Path) -> None:
    write(tmp_path / "cpu/online", "0-\x00")
    write(tmp_path / "node/online", "none")
    write(tmp_path / "cpu/cpu0/topology/thread_siblings_list", "")
    assert machine.topology(tmp_path, {0}) == [Cpu(0, 0, 0)]


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (16.0, 8), (3.5, 3), (1.0, 1), (0.2, 1)])
def test_quota(tmp_path: Path, quota: float | None, threads: int) -> None:
    cpus = machine.topology(two_sockets(tmp_path), range(16))
    place = machine.placement(cpus=cpus, quota=quota)
    assert place.threads == threads
    assert place.nodes is None or len(place.nodes) == threads


def test_fewer_nodes(tmp_path: Path) -> None:
    cpus = machine.topology(two_sockets(tmp_path), range(16))
    assert machine.placement(4, 1, cpus=cpus).cpus is None
    assert machine.placement(1, cpus=cpus).nodes is None
    assert machine.placement(3, 2, cpus=cpus).nodes == [0, 0, 1]


@pytest.mark.parametrize(
    ("threads", "nodes", "words"),
    [
        (0, None, "0 threads"),
        (-1, None, "-1 threads"),
        (4097, None, "4,097 threads"),
        (None, 3, "3 NUMA nodes cannot be used, the machine has 2"),
        (None, 0, "0 NUMA nodes"),
        (1, 2, "1 thread is too few"),
    ],
)
def test_threads_and_nodes_that_are_refused(
    tmp_path: Path, threads: int | None, nodes: int | None, words: str
) -> None:
    cpus = machine.topology(two_sockets(tmp_path), range(16))
    with pytest.raises(UsageError, match=words):
        machine.placement(threads, nodes, cpus=cpus)


# --- control groups


@pytest.mark.parametrize(
    ("files", "line", "expected"),
    [
        ({}, "0::/", None),
        ({"a/b/cpu.max": "max 100000"}, "0::/a/b", None),
        ({"a/b/cpu.max": "250000 100000"}, "0::/a/b", 2.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, "0::/a/b", 1.5),
        ({"a/b/cpu.max": "400000 100000", "a/cpu.max": "900000 100000"}, "0::/a/b", 4.0),
        ({"cpu.max": "100000 50000"}, "0::/of/the/host", 2.0),
        ({"cpu.max": "rubbish"}, "0::/", None),
        (
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "1e5"},
            "4:cpu,cpuacct:/a",
            3.0,
        ),
        (
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            "4:cpu:/",
            None,
        ),
        ({"memory/cpu.max": "1 1"}, "4:memory:/", None),
    ],
)
def test_cpu_quota(
    tmp_path: Path, files: dict[str, str], line: str, expected: float | None
) -> None:
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    write(tmp_path / "self", line)
    assert machine.cpu_quota(tmp_path / "groups", tmp_path / "self") == expected


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "line", "expected"),
    [
        ({}, "0::/", 64),
        ({"a/memory.max": "max", "a/memory.current": f"{GIB}"}, "0::/a", 64),
        ({"a/memory.max": f"{5 * GIB}", "a/memory.current": f"{GIB}"}, "0::/a", 4),
        ({"a/memory.high": f"{3 * GIB}", "a/memory.current": f"{GIB}"}, "0::/a", 2),
        ({"a/memory.max": f"{GIB}", "a/memory.current": f"{2 * GIB}"}, "0::/a", 0),
        ({"a/memory.max": f"{99 * GIB}", "a/memory.current": "0"}, "0::/a", 64),
        (
            {
                "a/memory.max": f"{8 * GIB}",
                "a/memory.high": "max",
                "a/memory.current": f"{7 * GIB}",
                "a/memory.stat": f"anon 5\nfile {3 * GIB}\nactive_file {GIB}\n"
                f"inactive_file {2 * GIB}\n",
            },
            "0::/a",
            4,
        ),
        (
            {
                "a/b/memory.max": f"{9 * GIB}",
                "a/b/memory.current": "0",
                "a/memory.max": f"{6 * GIB}",
                "a/memory.current": f"{GIB}",
            },
            "0::/a/b",
            5,
        ),
        ({"memory.max": f"{2 * GIB}", "memory.current": "0"}, "0::/of/the/host", 2),
        ({"memory.max": "rubbish", "memory.current": "0"}, "0::/", 64),
        ({"memory.max": f"{2 * GIB}"}, "0::/", 64),
        (
            {
                "memory/a/memory.limit_in_bytes": f"{4 * GIB}",
                "memory/a/memory.usage_in_bytes": f"{3 * GIB}",
                "memory/a/memory.stat": f"active_file 1\ntotal_inactive_file {2 * GIB}\n",
            },
            "9:memory:/a\n4:cpu:/other",
            3,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1",
            },
            "9:memory:/",
            64,
        ),
        ({"cpu/memory.max": "1", "cpu/memory.current": "0"}, "4:cpu:/", 64),
    ],
)
def test_memory_of_control_groups(
    tmp_path: Path, files: dict[str, str], line: str, expected: int
) -> None:
    """In GiB; the machine has 64."""
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    write(tmp_path / "self", line)
    write(tmp_path / "meminfo", f"MemTotal: {99 << 20} kB\nMemAvailable:  {64 << 20} kB")
    found = machine.available_memory(tmp_path / "groups", tmp_path / "self", tmp_path / "meminfo")
    assert found == expected * GIB


def test_memory_where_nothing_can_be_read(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert machine.available_memory(none, none, none) == machine.total_memory()
    assert 0 < machine.available_memory() <= machine.total_memory()


def test_without_control_groups(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path, tmp_path / "none") is None


def test_this_machine() -> None:
    cpus = machine.topology()
    assert {cpu.number for cpu in cpus} <= machine._affinity()
    assert 1 <= machine.usable_cores() <= machine.usable_cpus()
    place = machine.placement()
    assert place.threads == machine.usable_cores()


_BOUND = """
import ctypes, sys
mask = (ctypes.c_ulong * 17)(int(sys.argv[2]))  # of nodes
if ctypes.CDLL(None, use_errno=True).syscall(238, int(sys.argv[1]), mask, 1024) != 0:
    sys.exit(3)
from ktconv.system import machine
print(sorted(machine.allowed_memory()))
"""
_BIND, _PREFERRED, _RELATIVE, _STATIC = 2, 1, 1 << 14, 1 << 15  # of the kernel's mempolicy.h


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="numbers of x86-64 Linux"
)
@pytest.mark.skipif(machine.numa_nodes() > 1, reason="this machine has several nodes")
@pytest.mark.parametrize(
    ("mode", "mask"),
    [
        (_BIND, 1),
        (_BIND | _STATIC, 0b1001),  # node 3 is not there
        (_BIND | _RELATIVE, 0b1000),  # the fourth of one node: the first, counted round
        (_BIND | _RELATIVE, 0b0110),
        (_PREFERRED, 1),
    ],
)
def test_nodes_of_a_policy(mode: int, mask: int) -> None:
    """As `numactl --membind` sets it; +N counts among the nodes of the cpuset."""
    found = subprocess.run(
        [sys.executable, "-c", _BOUND, str(mode), str(mask)], capture_output=True, text=True
    )
    if found.returncode == 3:
        pytest.skip("the system does not let this process set a policy")
    assert (found.returncode, found.stdout) == (0, "[0]\n"), found.stderr
