"""The function that Ray calls on a node. It is found there by its name, in the installed ktconv."""

from __future__ import annotations

from collections.abc import Iterator

from ktconv.distributed.jobs import Message, perform


def run(key: str, target: str, arguments: str, code: str) -> Iterator[Message]:
    """`jobs.perform` with the arguments as JSON text; the first message has the node's id."""
    import json

    import ray

    node = ray.get_runtime_context().get_node_id()
    for message in perform(key, target, json.loads(arguments), code):
        yield message | {"node_id": node} if message["event"] == "started" else message
