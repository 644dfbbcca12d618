"""What this machine has: CPUs, NUMA nodes, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ktconv.errors import UsageError
from ktconv.units import parse_ranges


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def numa_nodes() -> int:
    """NUMA nodes with CPUs and memory; 1 where the system does not say."""
    counts = [_node_list(kind) for kind in ("has_cpu", "has_normal_memory")]
    return max(1, len(set.intersection(*counts)))


def _node_list(kind: str) -> set[int]:
    """Nodes of a kind: the kernel writes them like 0-1,3."""
    try:
        text = Path("/sys/devices/system/node", kind).read_text().strip()
        return set(parse_ranges(text, kind))
    except (OSError, UsageError):
        return set()


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


def available_memory() -> int:
    """Bytes that could be used without swapping, as far as the system says."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return total_memory()
    match = re.search(r"MemAvailable:\s+([0-9]+) kB", text)
    return int(match[1]) * 1024 if match else total_memory()


def disk_free(path: Path) -> int:
    """Bytes free where `path` is or would be created."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def cpu_model() -> str:
    """The CPU's name, or the architecture where it has none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1] if match else os.uname().machine
