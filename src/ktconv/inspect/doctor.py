"""Features of this machine that ktconv uses, for users and bug reports."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from ktconv import __version__, native
from ktconv.errors import UsageError
from ktconv.system import machine
from ktconv.system import nodes as numa

OPTIONAL_PACKAGES = {
    "huggingface_hub": "hub ids as MODEL",
    "torch": "extra model",
    "transformers": "extra model",
    "peft": "extra train",
    "accelerate": "extra train",
    "compressed-tensors": "verify --level model of GPU checkpoints, extra gpu",
    "llmcompressor": "extra gpu",
    "datasets": "extra gpu",
    "matplotlib": "extra plot",
}


def examine(directory: Path) -> dict[str, Any]:
    """Facts as nested names and values, ready for JSON."""
    features = native.cpu_features()
    return {
        "schema": 1,
        "ktconv": __version__,
        "python": platform.python_version(),
        "cpu": {
            "model": machine.cpu_model(),
            "architecture": platform.machine(),
            "usable_cpus": machine.usable_cpus(),
            "numa_nodes": machine.numa_nodes(),
            "levels": native.isa_available(),
            "level_in_use": _level(),
            "features": [name for name, present in features.items() if present],
            "amx": _amx(features),
        },
        "memory": {
            "total_bytes": machine.total_memory(),
            "available_bytes": machine.available_memory(),
            "transparent_huge_pages": numa.transparent_pages() or "none",
        },
        "numa_nodes": {str(node.number): _node(node) for node in numa.nodes()},
        "remarks": [*numa.remarks(), *filter(None, [numa.memory_remark()])],
        "disk": {"directory": str(directory), "free_bytes": machine.disk_free(directory)},
        "packages": {name: _package(name, use) for name, use in OPTIONAL_PACKAGES.items()},
    }


def _node(node: numa.Node) -> dict[str, Any]:
    """CPUs, memory and huge pages of a NUMA node, for the document."""
    return {
        "cpus": len(node.cpus),
        "usable_cpus": len(numa.cpus_of(node.number)),
        "total_bytes": node.total,
        "available_bytes": node.available,
        "reserved_huge_pages_bytes": node.huge_total,
        "free_huge_pages_bytes": node.huge_free,
        "distances": {str(other): away for other, away in node.distances.items()},
    }


def _level() -> str:
    try:
        return native.isa()
    except UsageError as error:
        return f"none: {error}"


def _amx(features: dict[str, bool]) -> str:
    claimed = ", KTCONV_ASSUME claims it" if "amx" in native.isa_available() else ""
    if not features["amx_tile"]:
        return "this CPU has none" + claimed
    if not features["amx_permission"]:
        return "present, but the kernel refuses tile state to this process" + claimed
    if "amx" not in native.isa_available():
        return "present, but other instructions that its kernels need are missing or hidden"
    return "ready"


def _package(name: str, use: str) -> str:
    """The version, and who needs another one: pip only warns of that."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"not installed ({use})"
    return "; ".join([found, *_wanted_otherwise(name, found)])


def _wanted_otherwise(name: str, found: str) -> Iterator[str]:
    """Packages that need another version of a package than `found`, in words."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it comes with transformers
        return
    for needing in ("ktconv", *OPTIONAL_PACKAGES):
        for requirement in map(Requirement, _requirements(needing)):
            same = requirement.name.replace("_", "-") == name.replace("_", "-")
            if same and not requirement.specifier.contains(found, prereleases=True):
                yield f"{needing} {version(needing)} needs {requirement.specifier}"


def _requirements(name: str) -> list[str]:
    """Requirements of an installed package, without those of its extras; of ktconv, with them."""
    try:
        found = requires(name) or []
    except PackageNotFoundError:
        return []
    return [text for text in found if name == "ktconv" or "extra ==" not in text]
