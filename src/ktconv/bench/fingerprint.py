"""The machine, versions and command that a measurement depends on."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ktconv import __version__, native
from ktconv.system import machine

_SYS = Path("/sys/devices/system/cpu")


def fingerprint() -> dict[str, Any]:
    """Facts ready for JSON."""
    return {
        "cpu": machine.cpu_model(),
        "architecture": platform.machine(),
        "usable_cpus": machine.usable_cpus(),
        "caches": caches(),
        "numa_nodes": machine.numa_nodes(),
        "governor": machine.text_of(_SYS / "cpu0/cpufreq/scaling_governor") or "unknown",
        "features": [name for name, present in native.cpu_features().items() if present],
        "memory_bytes": machine.total_memory(),
        "system": f"{platform.system()} {platform.release()}",
        "ktconv": __version__,
        "python": platform.python_version(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith("KTCONV_")
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["ktconv", *sys.argv[1:]],
    }


def caches() -> dict[str, str]:
    """Sizes by name, as the kernel reports them: {"L1d": "32K", "L2": "1024K", ...}."""
    found = {}
    for index in sorted((_SYS / "cpu0/cache").glob("index*")):
        level, kind, size = (machine.text_of(index / name) for name in ("level", "type", "size"))
        letter = {"Data": "d", "Instruction": "i"}.get(kind, "")
        if level and size:
            found[f"L{level}{letter}"] = size
    return found


def largest_cache() -> int:
    """Bytes; 32 MiB if the kernel does not report any size."""
    sizes = [int(size[:-1]) << 10 for size in caches().values() if size.endswith("K")]
    return max(sizes, default=32 << 20)
