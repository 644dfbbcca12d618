"""`--ray`: conversions on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ktconv.cli.parsing import option
from ktconv.errors import UsageError

if TYPE_CHECKING:
    from ktconv.cli.options import Job
    from ktconv.quantize_cpu.run import Request

RayOption = Annotated[
    str | None,
    option(
        "Convert on the nodes of a Ray cluster: HOST:PORT, auto (the default: RAY_ADDRESS, or the "
        "cluster of this machine) or local.",
        "[ADDRESS]",
        "--ray",
    ),
]
RayScratchOption = Annotated[
    Path | None,
    option("With --ray, for an OUTPUT that nodes do not share: their local directory.", "DIR"),
]


@contextmanager
def on_cluster(
    address: str | None, scratch: Path | None, request: Request, cache_dir: Path | None
) -> Iterator[tuple[Request, Job | None]]:
    """The request with the threads of one node's job, and what runs it; without an address both
    are as they are on one machine. UsageError for options that need one process."""
    if address is None:
        if scratch is not None:
            raise UsageError("--ray-scratch belongs to --ray", "add --ray, or omit it")
        yield request, None
        return
    if cache_dir is not None:
        raise UsageError(
            "--cache-dir keeps what one process reads, and cannot be combined with --ray",
            "omit it; each node reads only the layers that it converts",
        )
    from ktconv.distributed.cluster import connected
    from ktconv.distributed.conversion import Distribution, quantize_cpu_on, refuse_on_cluster

    refuse_on_cluster(request)
    with connected(address, request.threads) as cluster:
        request = replace(request, threads=request.threads or cluster.default_cpus())
        yield request, partial(quantize_cpu_on, Distribution(cluster, scratch))
