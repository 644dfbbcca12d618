#!/usr/bin/env python3
"""How long a conversion takes on N machines, from measured costs: what binds, and from where on.

A layer is converted by one machine at a time. Each machine reads a layer, computes, and writes its
output, all of it at once for different layers; machines share one server of files, or read from a
source of their own. The time is that of whatever is busy longest:

    cpu      source * cpu_seconds_per_gb / cores, of the machine with the most layers
    link     (source + output) of that machine / its network, each direction for itself
    server   source / the server's reading + output / its writing, for all machines together

    scaling.py                                   # DeepSeek-V3, 32 cores, 10 Gbit/s, one NFS server
    scaling.py --link 3.1 --server-read 6 --server-write 3
    scaling.py --hub 1.25                        # the source from the hub or an object store
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Model:
    """Bytes as they are on a disk."""

    source: float
    output: float
    layers: int  # that are shared out


# 58 MoE layers and one for multi-token prediction of 256 experts, 3 * 7168 * 2048 weights each:
# FP8 with a float32 for 128 x 128; 4 bits and a float32 for a row; what is left of the 688.6 GB of
# the checkpoint are other tensors, which are copied.
_WEIGHTS = 59 * 256 * 3 * 7168 * 2048
_SCALES = 59 * 256 * (2 * 2048 + 7168) * 4
_OTHERS = 23.2 * GB
DEEPSEEK_V3 = Model(_WEIGHTS * (1 + 4 / 128**2) + _OTHERS, _WEIGHTS / 2 + _SCALES + _OTHERS, 59)


@dataclass(frozen=True)
class Costs:
    """GB/s and seconds; `hub`: GB/s of each machine from elsewhere, None: the server has all."""

    cpu_seconds_per_gb: float
    cores: int
    link: float
    server_read: float
    server_write: float
    hub: float | None


def seconds(model: Model, costs: Costs, nodes: int) -> dict[str, float]:
    """Of everything that is busy at the same time."""
    share = -(-model.layers // nodes) / model.layers  # of the machine with the most layers
    source, output = model.source / GB, model.output / GB
    compute = share * source * costs.cpu_seconds_per_gb / costs.cores
    reading = source / costs.server_read if costs.hub is None else 0.0
    return {
        "cpu": compute,
        "link": share * max(source / (costs.hub or costs.link), output / costs.link),
        "server": reading + output / costs.server_write,
    }


def rows(model: Model, costs: Costs, counts: list[int]) -> Iterator[str]:
    yield "| machines | cpu | link | server | time | binds |"
    yield "| ---: | ---: | ---: | ---: | ---: | --- |"
    for nodes in counts:
        found = seconds(model, costs, nodes)
        slowest = max(found, key=found.__getitem__)
        parts = " | ".join(_minutes(one) for one in found.values())
        yield f"| {nodes} | {parts} | {_minutes(found[slowest])} | {slowest} |"


def _minutes(value: float) -> str:
    return f"{value / 60:.1f} min"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=float, default=DEEPSEEK_V3.source / GB, help="GB")
    parser.add_argument("--output", type=float, default=DEEPSEEK_V3.output / GB, help="GB")
    parser.add_argument("--layers", type=int, default=DEEPSEEK_V3.layers)
    parser.add_argument("--cpu", type=float, default=7.1, help="CPU seconds per GB of source")
    parser.add_argument("--cores", type=int, default=32, help="of each machine")
    parser.add_argument("--link", type=float, default=1.25, help="GB/s of each machine")
    parser.add_argument("--server-read", type=float, default=1.25, help="GB/s of the server")
    parser.add_argument("--server-write", type=float, default=1.25, help="GB/s of the server")
    parser.add_argument("--hub", type=float, help="GB/s that each machine gets from elsewhere")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    given = parser.parse_args()
    model = Model(given.source * GB, given.output * GB, given.layers)
    costs = Costs(
        given.cpu, given.cores, given.link, given.server_read, given.server_write, given.hub
    )
    print(f"{given.source:.0f} GB in, {given.output:.0f} GB out, {given.layers} layers")
    print("\n".join(rows(model, costs, given.nodes)))


if __name__ == "__main__":
    main()
