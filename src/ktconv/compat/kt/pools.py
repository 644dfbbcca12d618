"""Threads for the settings of a wrapper."""

from __future__ import annotations

from ktconv.compat.kt.settings import Settings
from ktconv.system import machine
from ktconv.system.pool import Pool


def pool_of(settings: Settings) -> Pool:
    """The process's pool of these threads on these NUMA nodes. Wrappers with other settings have
    another one.

    Without `numa_nodes` there is a node for each part, as far as the machine has nodes and there
    are threads. UsageError for nodes that it does not have.
    """
    if settings.numa_nodes is not None:
        return Pool.shared(settings.threads, settings.numa_nodes)
    nodes = len({cpu.node for cpu in machine.topology()})
    return Pool.shared(settings.threads, max(1, min(settings.parts, nodes, settings.threads)))
