"""One Ray cluster for all tests here: starting a node takes seconds.

It ends with them, since its processes take CPU for as long as they live. Fixtures of scope package
would live as long as the whole run: this is no package, which would hide one named `distributed`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import ray_jobs
from helpers.cli import done, write_model

import ktconv
from ktconv.distributed.cluster import Cluster, connected

LAYERS = 4
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 2 << 30}


@contextmanager
def started() -> Iterator[tuple[Any, Cluster]]:
    """A cluster of a head, which converts nothing, and two nodes of one CPU: what Ray has started,
    and this process connected to it."""
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
            "include_log_monitor": False, "no_monitor": True,  # these look around all the time
            # A killed node is known to be dead after seconds, not after half a minute.
            "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 5},
        },
    )  # fmt: skip
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        with connected(cluster.address) as found:
            yield cluster, found
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Running:
    """The cluster, from the first test that asks for it to the last test here."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.found: tuple[Any, Cluster] | None = None

    def both(self) -> tuple[Any, Cluster]:
        if self.found is None:
            self.found = self._stack.enter_context(started())
        return self.found

    def end(self) -> None:
        self.found = None
        self._stack.close()


running = Running()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        running.end()


def pytest_sessionfinish() -> None:
    running.end()  # of a run that was interrupted


@pytest.fixture
def nodes() -> Any:
    """Processes that Ray has started."""
    pytest.importorskip("ray")
    return running.both()[0]


@pytest.fixture
def cluster(nodes: Any) -> Cluster:
    """This process is connected, so commands in it are, too."""
    return running.both()[1]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=LAYERS, experts=2)


@pytest.fixture(scope="session")
def clean(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, converted on one machine."""
    output = tmp_path_factory.mktemp("clean") / "output"
    done(model, output)
    return output
