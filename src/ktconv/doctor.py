"""What this machine can do, for people and for bug reports."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ktconv import __version__, machine, native
from ktconv.errors import UsageError

OPTIONAL_PACKAGES = {
    "huggingface_hub": "hub ids as MODEL",
    "torch": "extra model",
    "transformers": "extra model",
    "llmcompressor": "extra gpu",
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
        },
        "disk": {"directory": str(directory), "free_bytes": machine.disk_free(directory)},
        "packages": {name: _package(name, use) for name, use in OPTIONAL_PACKAGES.items()},
    }


def _level() -> str:
    try:
        return native.isa()
    except UsageError as error:
        return f"none: {error}"


def _amx(features: dict[str, bool]) -> str:
    if not features["amx_tile"] and "amx" in native.isa_available():
        return "this CPU has none, KTCONV_ASSUME claims it"
    if not features["amx_tile"]:
        return "this CPU has none"
    if not features["amx_permission"]:
        return "present, but the kernel refuses tile state to this process"
    return "ready"


def _package(name: str, use: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed ({use})"
