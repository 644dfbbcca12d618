"""One Ray cluster for all tests here: starting a node takes seconds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ray_jobs
from helpers.cli import done, write_model

import ktconv
from ktconv.distributed.cluster import Cluster, connected

LAYERS = 4
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 2 << 30}


@pytest.fixture(scope="package")
def nodes() -> Iterator[Any]:
    """A cluster of a head, which converts nothing, and two nodes of one CPU."""
    pytest.importorskip("ray")
    paths = [str(Path(ktconv.__file__).parents[1]), str(Path(ray_jobs.__file__).parents[1])]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets have 107 bytes at most
    changed = {
        "RAY_TMPDIR": folder,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # whatever token the user has
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster(
        initialize_head=True,
        head_node_args={
            **NODE, "num_cpus": 0, "include_dashboard": False,
            # A killed node is known to be dead after seconds, not after half a minute.
            "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 5},
        },
    )  # fmt: skip
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture(scope="package")
def cluster(nodes: Any) -> Iterator[Cluster]:
    """This process is connected, so commands in it are, too."""
    with connected(nodes.address) as found:
        yield found


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=LAYERS, experts=2)


@pytest.fixture(scope="package")
def clean(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, converted on one machine."""
    output = tmp_path_factory.mktemp("clean") / "output"
    done(model, output)
    return output
