"""`--ray`: conversions on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from ktconv.cli.parsing import option
from ktconv.errors import UsageError

if TYPE_CHECKING:
    from ktconv.cli.options import Job
    from ktconv.quantize.encoded.request import Request as GpuRequest
    from ktconv.quantize.packed.run import Request
    from ktconv.verify.request import VerifyRequest
    from ktconv.verify.run import Reading

    AnyRequest = TypeVar("AnyRequest", Request, GpuRequest)

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
    address: str | None,
    scratch: Path | None,
    request: AnyRequest,
    cache_dir: Path | None,
    job: Job,
    there: str,
) -> Iterator[tuple[AnyRequest, Job]]:
    """The request with the threads of one node's job, and what runs it: the function `there` of
    distributed.conversion; without an address `job`, with the request as it is. UsageError for
    options that need one process."""
    if address is None:
        if scratch is not None:
            raise UsageError("--ray-scratch belongs to --ray", "add --ray, or omit it")
        yield request, job
        return
    if cache_dir is not None:
        raise UsageError(
            "--cache-dir keeps what one process reads, and cannot be combined with --ray",
            "omit it; each node reads only the layers that it converts",
        )
    from ktconv.distributed import conversion
    from ktconv.distributed.cluster import connected

    conversion.refuse_on_cluster(request)
    with connected(address, request.threads) as cluster:
        distribution = conversion.Distribution(cluster, scratch)
        yield distribution.fitted(request), partial(getattr(conversion, there), distribution)


@contextmanager
def reading_on(
    address: str | None, request: VerifyRequest, other: Path | None
) -> Iterator[tuple[VerifyRequest, Reading | None]]:
    """The request with the threads of one node's job, and what reads for `verify`; without an
    address both are as they are on one machine."""
    if address is None:
        yield request, None
        return
    if other is not None:
        raise UsageError(
            "--ray does not apply when comparing two conversions",
            "omit it, or verify each against its --source",
        )
    from ktconv.distributed.cluster import connected
    from ktconv.distributed.verification import OnNodes

    with connected(address, request.threads) as cluster:
        threads = request.threads or cluster.default_cpus()
        yield replace(request, threads=threads), OnNodes(cluster)
