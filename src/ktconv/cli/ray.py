"""`--ray`: conversions on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec.structs import replace

from ktconv.cli.conflicts import Conflict, belongs
from ktconv.cli.help import ADVANCED
from ktconv.cli.parameters import option

if TYPE_CHECKING:
    from ktconv.cli.options import Job
    from ktconv.quantize.encoded.request import Request as EncodedRequest
    from ktconv.quantize.gguf.run import Request as GgufRequest
    from ktconv.quantize.packed.run import Request
    from ktconv.verify.request import VerifyRequest
    from ktconv.verify.run import Reading

    AnyRequest = TypeVar("AnyRequest", Request, EncodedRequest, GgufRequest)

RayOption = Annotated[
    str | None,
    option(
        "Work on the nodes of a Ray cluster: docs/ray.md.",
        "[ADDRESS]",
        "--ray",
        detail="- HOST:PORT: the cluster there\n- auto: RAY_ADDRESS, or the cluster of this "
        "machine; the same without a value\n- local: this machine alone",
    ),
]
RayScratchOption = Annotated[
    Path | None,
    option(
        "Local directory of each node, for --ray.",
        "DIR",
        panel=ADVANCED,
        detail="Needed for an OUTPUT that the nodes do not share.",
    ),
]


RAY_CONFLICTS = (
    *belongs(["--ray-scratch"], "--ray", "add --ray, or omit it"),
    Conflict(
        "--cache-dir --ray",
        "--cache-dir keeps what one process reads, and cannot be combined with --ray",
        "omit it; each node reads only the layers that it converts",
    ),
)


@contextmanager
def on_cluster(
    address: str | None,
    scratch: Path | None,
    request: AnyRequest,
    job: Job,
) -> Iterator[tuple[AnyRequest, Job]]:
    """The request with the threads of one node's job, and what runs it on nodes; without an
    address `job`, with the request as it is."""
    if address is None:
        yield request, job
        return
    from ktconv.distributed.cluster import connected
    from ktconv.distributed.commands import convert_on, refuse_on_cluster
    from ktconv.distributed.conversion import Distribution

    refuse_on_cluster(request)
    with connected(address, request.threads) as cluster:
        distribution = Distribution(cluster, scratch)
        yield distribution.fitted(request), partial(convert_on, distribution)


@contextmanager
def reading_on(
    address: str | None, request: VerifyRequest
) -> Iterator[tuple[VerifyRequest, Reading | None]]:
    """The request with the threads of one node's job, and what reads for `verify`; without an
    address both are as they are on one machine."""
    if address is None:
        yield request, None
        return
    from ktconv.distributed.cluster import connected
    from ktconv.distributed.verification import OnNodes

    with connected(address, request.threads) as cluster:
        threads = request.threads or cluster.default_cpus()
        yield replace(request, threads=threads), OnNodes(cluster)
