"""What a layer costs through Ray, beside its conversion: many tiny layers on a small cluster.

    python benchmarks/ray_layers.py [LAYERS] [NODES]

Prints seconds per layer for jobs that do nothing, for the conversion through Ray, and for the
same conversion in one process with as many threads.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
HERE = Path(__file__).resolve().parents[1]
PATHS = [str(HERE / "src"), str(HERE / "tests")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])


def main(layers: int = 1000, nodes: int = 2) -> None:
    from helpers.cli import write_model
    from helpers.ray_jobs import request
    from ray.cluster_utils import Cluster as RayCluster

    from ktconv.distributed.cluster import connected
    from ktconv.distributed.commands import convert_on
    from ktconv.distributed.conversion import Distribution
    from ktconv.distributed.driver import Listener, run_jobs
    from ktconv.distributed.jobs import Job
    from ktconv.quantize.packed.run import quantize_cpu

    store: dict[str, Any] = {"object_store_memory": 80 << 20, "memory": 2 << 30}
    folder = Path(tempfile.mkdtemp())
    ray = RayCluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store}
    )
    try:
        for _ in range(nodes):
            ray.add_node(num_cpus=1, **store)
        with connected(ray.address) as cluster:
            warm = [Job(f"warm-{n}", "count", {"number": n}) for n in range(4 * nodes)]
            run_jobs(warm, cluster, Listener())
            jobs = [Job(f"job-{n}", "count", {"number": n}) for n in range(layers)]
            started = time.perf_counter()
            assert not run_jobs(jobs, cluster, Listener())
            empty = time.perf_counter() - started
            model = write_model(folder / "model", layers=layers, experts=1)
            started = time.perf_counter()
            convert_on(Distribution(cluster), request(model, folder / "there"))
            there = time.perf_counter() - started
        started = time.perf_counter()
        quantize_cpu(request(model, folder / "here"))
        here = time.perf_counter() - started
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
    figures = {"layers": layers, "nodes": nodes}
    seconds = {"empty job": empty, "layer through Ray": there, "layer in one process": here}
    print(
        json.dumps(
            figures | {f"ms per {k}": round(1e3 * s / layers, 2) for k, s in seconds.items()}
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
