"""Kinds of jobs for tests, which nodes of a Ray cluster import, and a driver to kill."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ktconv.conversion.pipeline import Observer
from ktconv.distributed import units
from ktconv.distributed.cluster import connected
from ktconv.distributed.commands import convert_on
from ktconv.distributed.conversion import Distribution
from ktconv.distributed.jobs import KINDS, Reporter
from ktconv.errors import CheckpointError, ResourceError
from ktconv.quantize.packed.run import Request
from ktconv.targets.packed.target import Options

KINDS["gated"] = "helpers.ray_jobs:gated"
KINDS["failing"] = "helpers.ray_jobs:failing"
KINDS["dying"] = "helpers.ray_jobs:dying"
KINDS["count"] = "helpers.ray_jobs:count"


def log_of(output: Path) -> Path:
    """A line "unit node" for each attempt."""
    return output.with_name(f"{output.name}.log")


def gate_of(output: Path) -> Path:
    """While it exists, the node or unit in it waits."""
    return output.with_name(f"{output.name}.gate")


def here() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def gated(arguments: Any, reporter: Reporter) -> Any:
    """`convert`, behind the gate. Nodes other than the one in it wait until that has a unit,
    however late it starts."""
    output = Path(arguments["output"])
    with log_of(output).open("a") as log:
        log.write(f"{arguments['unit']} {here()}\n")
    while _held_back(output, arguments["unit"]):
        reporter.advanced(0)  # ends a job that is cancelled
        time.sleep(0.01)
    return units.convert(arguments, reporter)


def _held_back(output: Path, unit: str) -> bool:
    try:
        held = gate_of(output).read_text()
    except FileNotFoundError:
        return False
    of_a_node = not held.startswith(("layer-", "other-"))
    return held in (here(), unit) or (of_a_node and held not in log_of(output).read_text())


def failing(arguments: Any, reporter: Reporter) -> Any:
    """`convert`, which fails for layer 1, and on the first attempt for layer 2."""
    if arguments["unit"] == "layer-00001":
        raise CheckpointError("tensor X of layer 1 is damaged", "restore it")
    log = log_of(Path(arguments["output"]))
    if arguments["unit"] == "layer-00002" and not log.exists():
        log.touch()
        raise ResourceError("the disk of this node is full")
    return units.convert(arguments, reporter)


def dying(arguments: Any, reporter: Reporter) -> Any:
    """`convert`, whose process is gone for layer 1."""
    if arguments["unit"] == "layer-00001":
        os._exit(1)
    return units.convert(arguments, reporter)


def count(arguments: Any, reporter: Reporter) -> Any:
    return {"twice": 2 * arguments["number"]}


def request(model: Path, output: Path, **options: Any) -> Request:
    return Request(str(model), output, Options(numa=1, **options), threads=1)


def drive(address: str, model: str, output: str) -> None:
    """A driver of gated units, to be killed."""
    with connected(address) as cluster:
        convert_on(
            Distribution(cluster, kind="gated"), request(Path(model), Path(output)), Observer()
        )


if __name__ == "__main__":
    drive(*sys.argv[1:])
