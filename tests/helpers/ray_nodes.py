"""Nodes of a Ray cluster that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ktconv.distributed.cluster import Cluster


@contextmanager
def added_node(nodes: Any, cluster: Cluster) -> Iterator[tuple[str, Callable[[], None]]]:
    """A node more: its id, and what kills it."""
    before = {node.id for node in cluster.nodes()}
    node = nodes.add_node(num_cpus=1, object_store_memory=80 << 20, memory=2 << 30)
    nodes.wait_for_nodes()
    (added,) = {node.id for node in cluster.nodes()} - before
    removed = False

    def remove() -> None:
        nonlocal removed
        removed = True
        nodes.remove_node(node, allow_graceful=False)

    try:
        yield added, remove
    finally:
        if not removed:
            remove()
