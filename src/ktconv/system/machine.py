"""Hardware of this machine: CPUs, NUMA nodes, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.system.units import counted, parse_ranges

SYSTEM = Path("/sys/devices/system")
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
MAX_THREADS = 4096  # kt_pool_create's
_MOST_NODES = 1024  # as the kernel can be built for


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(_affinity())


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def numa_nodes() -> int:
    """NUMA nodes with CPUs and memory for this process; 1 where the system does not say."""
    return max(1, len({cpu.node for cpu in topology()}))


def numbers_in(path: Path) -> set[int]:
    """The numbers in a file of the kernel, like 0-1,3; none where it cannot be read."""
    try:
        return set(parse_ranges(text_of(path), path.name))
    except UsageError:
        return set()


def text_of(path: Path) -> str:
    """A file of the kernel, with names in any encoding; nothing where it cannot be read."""
    try:
        return path.read_text("utf-8", "surrogateescape").strip()
    except OSError:
        return ""


# --- threads on CPUs --------------------------------------------------------------------


class Cpu(Struct, frozen=True):
    """A logical CPU, its NUMA node by the system's number, and its core: siblings share one."""

    number: int
    node: int
    core: int


class Placement(Struct, frozen=True):
    """Places of the threads of a pool; node indices count from 0, os_nodes names them."""

    threads: int
    cpus: list[int] | None  # per thread; None: anywhere
    nodes: list[int] | None  # per thread, ascending; None: all 0
    os_nodes: list[int]


def allowed_memory() -> set[int]:
    """Nodes that memory of this process may come from, by cpusets and numactl; empty where the
    system does not say."""
    from ktconv import native  # not for a command's help: it needs NumPy

    found = native.allowed_nodes(_MOST_NODES)
    if found is not None:
        return set(found)
    match = re.search(r"^Mems_allowed_list:\s*(\S+)$", text_of(STATUS), re.MULTILINE)
    return set(parse_ranges(match[1], "Mems_allowed_list")) if match else set()


def topology(
    system: Path = SYSTEM,
    usable: Iterable[int] | None = None,
    memory: Collection[int] | None = None,
) -> list[Cpu]:
    """The CPUs that this process may run on, ascending.

    A CPU whose node has no memory, or none for this process, counts with the nearest that has
    some. `memory`: the nodes that may be used; of another machine than this one, default all.
    """
    allowed = _affinity() if usable is None else set(usable)
    online = numbers_in(system / "cpu/online")
    nodes = system / "node"
    with_memory = numbers_in(nodes / "has_normal_memory") or numbers_in(nodes / "has_memory")
    if memory is None:
        memory = allowed_memory() if system == SYSTEM else ()
    with_memory = with_memory & set(memory) or with_memory
    node_of = {
        cpu: node
        for node in numbers_in(nodes / "online")
        for cpu in numbers_in(nodes / f"node{node}/cpulist")
    }
    nearest = {node: _nearest(node, with_memory, system) for node in set(node_of.values())}
    first = min(with_memory, default=0)
    found = []
    for number in sorted(allowed & online if online else allowed):
        node = nearest.get(node_of.get(number, first), first)
        siblings = numbers_in(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        found.append(Cpu(number, node, min(siblings | {number})))
    return found


def _nearest(node: int, with_memory: set[int], system: Path) -> int:
    """The node itself, or of those with memory the nearest, the first where several are."""
    if node in with_memory or not with_memory:
        return node
    away = [int(word) for word in text_of(system / f"node/node{node}/distance").split()]
    distance = dict(zip(sorted(numbers_in(system / "node/online")), away, strict=False))
    return min(with_memory, key=lambda other: (distance.get(other, 0), other))


def cpu_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time that control groups allow this process; None: no limit."""
    return min(_group_limits("cpu", _cpu_limit, root, membership), default=None)


def _group_limits(
    controller: str, read: Callable[[Path], float | None], root: Path, membership: Path
) -> Iterator[float]:
    """Limits that `read` finds in the groups of this process and in all above them."""
    for line in text_of(membership).splitlines():
        for folder in _groups(controller, root, line):
            limit = read(folder)
            if limit is not None:
                yield limit


def _groups(controller: str, root: Path, line: str) -> Iterator[Path]:
    """Folders of a group and of all above it; version 2 has no controllers in the line.

    In a container the path may be one of the host, of which only the top is visible.
    """
    _, controllers, path = line.split(":", 2)
    if controllers and controller not in controllers.split(","):
        return
    top = root / controllers if controllers else root
    group = top / path.lstrip("/")
    for folder in [group, *group.parents]:
        yield folder
        if folder == top:
            return


def _cpu_limit(folder: Path) -> float | None:
    files = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    for names in files:
        try:
            quota, period = " ".join(text_of(folder / name) for name in names).split()[:2]
            return float(quota) / float(period) if float(quota) > 0 else None
        except (ValueError, ZeroDivisionError):
            continue  # no such file, or "max"
    return None


def usable_cores(cpus: list[Cpu] | None = None, quota: float | None = None) -> int:
    """Physical cores for busy threads: usable ones, as many as the CPU quota pays for."""
    cores = len({cpu.core for cpu in (topology() if cpus is None else cpus)})
    quota = cpu_quota() if cpus is None else quota
    return max(1, cores if quota is None else min(cores, int(quota)))


def placement(
    threads: int | None = None,
    nodes: int | Collection[int] | None = None,
    *,
    cpus: list[Cpu] | None = None,
    quota: float | None = None,
) -> Placement:
    """Threads for this machine: one per usable core, on CPUs of their own if it has NUMA nodes.

    `nodes` limits how many nodes are used, and 1 lets the threads run anywhere; or it has the
    system's numbers of those to use. `cpus` and `quota` describe another machine than this one.
    """
    if cpus is None:
        cpus, quota = topology(), cpu_quota()
    single = len({cpu.node for cpu in cpus}) < 2
    named = isinstance(nodes, Collection)
    if isinstance(nodes, Collection):
        cpus = _on_nodes(cpus, nodes)
        nodes = len(set(nodes))
    by_node = _by_node(cpus)
    _check_counts(threads, nodes, len(by_node))
    threads = usable_cores(cpus, quota) if threads is None else threads
    used = list(by_node)[: min(nodes or len(by_node), threads)]
    if single or (len(used) < 2 and not named):
        return Placement(threads, None, None, list(by_node)[:1] or [0])
    counts = _deal(threads, [len({cpu.core for cpu in cpus if cpu.node == n}) for n in used])
    chosen = [
        (index, by_node[node][i % len(by_node[node])])
        for index, node in enumerate(used)
        for i in range(counts[index])
    ]
    return Placement(threads, [cpu for _, cpu in chosen], [index for index, _ in chosen], used)


def _on_nodes(cpus: list[Cpu], nodes: Collection[int]) -> list[Cpu]:
    there = sorted({cpu.node for cpu in cpus})
    missing = sorted(set(nodes) - set(there))
    if missing or not nodes:
        raise UsageError(
            f"the machine has no NUMA node {missing[0]} for this process"
            if missing
            else "an empty list of NUMA nodes cannot be used",
            f"it has {', '.join(map(str, there))}",
        )
    return [cpu for cpu in cpus if cpu.node in nodes]


def _deal(threads: int, cores: list[int]) -> list[int]:
    """Threads for each node: one at least, then in proportion to its cores."""
    counts = [1] * len(cores)
    for _ in range(threads - len(cores)):
        counts[min(range(len(cores)), key=lambda i: (counts[i] + 1) / cores[i])] += 1
    return counts


def _by_node(cpus: list[Cpu]) -> dict[int, list[int]]:
    """CPU numbers of each node, one of every core before the second of any."""
    found: dict[int, list[tuple[int, int]]] = {}
    seen: dict[int, int] = {}
    for cpu in cpus:
        seen[cpu.core] = seen.get(cpu.core, -1) + 1
        found.setdefault(cpu.node, []).append((seen[cpu.core], cpu.number))
    return {node: [number for _, number in sorted(found[node])] for node in sorted(found)}


def _check_counts(threads: int | None, nodes: int | None, available: int) -> None:
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError(
            f"{counted(threads, 'thread')} cannot be used",
            f"use 1 to {MAX_THREADS}, or omit the option",
        )
    if nodes is not None and not 1 <= nodes <= max(1, available):
        raise UsageError(
            f"{nodes} NUMA nodes cannot be used, the machine has {max(1, available)} for this "
            "process",
            "omit the number to use all nodes",
        )
    if threads is not None and nodes is not None and threads < nodes:
        raise UsageError(
            f"{counted(threads, 'thread', 'are')} too few for {nodes} NUMA nodes",
            "each node needs at least one",
        )


# --- memory and disk --------------------------------------------------------------------


def resident_memory() -> int:
    """Bytes of physical memory this process uses now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 100 << 20  # about an interpreter with NumPy
    return pages * os.sysconf("SC_PAGE_SIZE")


def total_memory() -> int:
    """Bytes of physical memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(
    root: Path = CGROUPS, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO
) -> int:
    """Bytes that could be used without swapping, as far as the system and control groups say."""
    rooms = _group_limits("memory", _memory_room, root, membership)
    return min([_machine_memory(meminfo), *map(int, rooms)])


def _machine_memory(meminfo: Path) -> int:
    match = re.search(r"MemAvailable:\s+([0-9]+) kB", text_of(meminfo))
    return int(match[1]) * 1024 if match else total_memory()


def _memory_room(folder: Path) -> float | None:
    """Memory that a group may still use. Pages of files count as used, but are given back on
    demand."""
    for limits, usage, prefix in (
        (("memory.max", "memory.high"), "memory.current", ""),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    ):
        found = [size for name in limits if (size := _size_in(folder / name)) is not None]
        used = _size_in(folder / usage)
        if found and used is not None:
            return max(0, min(found) - max(0, used - _file_pages(folder / "memory.stat", prefix)))
    return None


def _file_pages(stat: Path, prefix: str) -> int:
    lines = re.findall(rf"^{prefix}(?:in)?active_file ([0-9]+)$", text_of(stat), re.MULTILINE)
    return sum(map(int, lines))


def _size_in(path: Path) -> int | None:
    """Bytes; None where there is no such file, or it says max."""
    try:
        return int(text_of(path))
    except ValueError:
        return None


def disk_free(path: Path) -> int:
    """Bytes free where `path` is or would be created."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def cpu_model() -> str:
    """The CPU's name, or the architecture where it has none."""
    match = re.search(r"model name\s*:\s*(.+)", text_of(Path("/proc/cpuinfo")))
    return match[1] if match else os.uname().machine
