"""NUMA nodes: CPUs, memory and huge pages of each, and what this process may use of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct

from ktconv import native
from ktconv.system import machine
from ktconv.system.machine import SYSTEM, Cpu, numbers_in, text_of

HUGE_PAGE = 2 << 20
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage")


class Node(Struct, frozen=True):
    """A NUMA node by the system's number; sizes are bytes."""

    number: int
    cpus: list[int]
    total: int
    available: int  # free, or held by files that can be read again
    distances: dict[int, int]  # by node; of memory: 10 is local
    huge_total: int  # reserved as pages of 2 MB
    huge_free: int


def nodes(system: Path = SYSTEM) -> list[Node]:
    """All that are online, ascending; none where the system does not say."""
    online = sorted(numbers_in(system / "node/online"))
    return [_node(system / f"node/node{number}", number, online) for number in online]


def _node(folder: Path, number: int, online: list[int]) -> Node:
    sizes = dict(re.findall(r"Node \d+ (\S+):\s+(\d+) kB", text_of(folder / "meminfo")))
    known = {name: 1024 * int(size) for name, size in sizes.items()}
    reclaimable = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    reserved = folder / "hugepages/hugepages-2048kB"
    away = [int(word) for word in text_of(folder / "distance").split() if word.isdigit()]
    return Node(
        number,
        sorted(numbers_in(folder / "cpulist")),
        known.get("MemTotal", 0),
        sum(known.get(name, 0) for name in reclaimable),
        dict(zip(online, away, strict=False)),
        HUGE_PAGE * count_in(reserved / "nr_hugepages"),
        HUGE_PAGE * count_in(reserved / "free_hugepages"),
    )


def count_in(path: Path) -> int:
    """The number in a file of the system; 0 where there is none."""
    text = text_of(path)
    return int(text) if text.isdigit() else 0


def transparent_pages(kind: str = "enabled", root: Path = TRANSPARENT) -> str:
    """The system's setting for transparent huge pages: always, madvise, never or others; empty
    where it has none. `kind`: "enabled" for private memory, "shmem_enabled" for shared memory."""
    match = re.search(r"\[(\w+)\]", text_of(root / kind))
    return match[1] if match else ""


def cpus_of(os_node: int, cpus: Collection[Cpu] | None = None) -> set[int]:
    """CPUs of a node that this process may run on."""
    return {
        cpu.number for cpu in (machine.topology() if cpus is None else cpus) if cpu.node == os_node
    }


def remarks(
    found: Collection[Node] | None = None,
    cpus: Collection[Cpu] | None = None,
    allowed: Collection[int] | None = None,
) -> Iterator[str]:
    """Sentences about what keeps weights from lying where they are computed, and what to set."""
    known = nodes() if found is None else found
    usable = machine.topology() if cpus is None else cpus
    may = machine.allowed_memory() if allowed is None else set(allowed)
    at = {cpu.number: cpu.node for cpu in usable}
    for node in known:
        own = [number for number in node.cpus if number in at]
        if own and any(at[number] != node.number for number in own):
            why = "is not for this process" if node.total else "does not exist"
            yield (
                f"NUMA node {node.number} has CPUs whose own memory {why}: their threads read "
                f"weights of node {at[own[0]]}"
            )
        elif node.cpus and not own and len(known) > 1:
            yield f"NUMA node {node.number} has no CPUs for this process, so it gets no weights"
        elif not node.cpus and node.total:
            yield f"NUMA node {node.number} has memory without CPUs, so it gets no weights"
    if len({cpu.node for cpu in usable}) > 1 and native.allowed_nodes(1) is None:
        yield (
            "the system does not let this process place memory (mbind, move_pages): weights are "
            "copied by threads of their node; docker run --cap-add SYS_NICE allows it"
        )
    if known and may and not may & {node.number for node in known if node.cpus}:
        yield "this process may take memory of nodes without CPUs only"


def memory_remark() -> str | None:
    """A sentence where huge pages for copied weights are turned off; None where they are not."""
    if transparent_pages() == "never":
        return (
            "transparent huge pages are off: echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled as root turns them on for weights"
        )
    return None
