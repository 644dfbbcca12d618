"""A Ray cluster as a `Scheduler`."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

from ktconv.distributed.driver import Scheduler
from ktconv.distributed.jobs import KINDS, Failure, Job, Message, fingerprint, perform_on_node
from ktconv.errors import KtconvError, ResourceError, UsageError
from ktconv.system.units import format_size

LOCAL, AUTO = "local", "auto"
CONNECT_SECONDS = 10.0
PENDING_MESSAGES = 8  # of a job, that the driver has not read yet
DEFAULT_CPUS = 8  # of a job: many jobs share a node, and the last ones still use all nodes
_HOST_PORT = re.compile(r"(?P<host>[^/\s]+):(?P<port>[0-9]{1,5})")
_TOKEN = re.compile("AuthenticationError|InvalidAuthToken|Unauthenticated|no authentication token")
_START = "start a cluster with: ray start --head; or use --ray local, a cluster of this machine"


class Node:
    """One machine of the cluster, as far as jobs are concerned."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.id: str = record["NodeID"]
        self.name = f"{record['NodeManagerHostname']} ({record['NodeManagerAddress']})"
        resources: dict[str, float] = record["Resources"]
        self.resources = resources
        self.cpus, self.memory = int(resources.get("CPU", 0)), int(resources.get("memory", 0))

    def fits(self, job: Job) -> int:
        """Number of such jobs that it runs at once."""
        rooms = [self.cpus // job.cpus] if job.cpus else [1]
        rooms += [self.memory // job.memory] if job.memory else []
        rooms += [int(self.resources.get(name, 0) // n) for name, n in job.resources.items() if n]
        return min(rooms)


class Cluster(Scheduler):
    """The Ray cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        options = {
            "max_retries": 0,  # the driver tries again, with names of its own for each attempt
            "num_returns": "streaming",
            "_generator_backpressure_num_objects": PENDING_MESSAGES,
        }
        self._task = ray.remote(**options)(perform_on_node)

    def nodes(self) -> list[Node]:
        """Nodes that are alive."""
        return [Node(record) for record in self._ray.nodes() if record["Alive"]]

    def working(self, job: Job) -> list[Node]:
        """Nodes that can run such a job. UsageError if there are none."""
        nodes = self.nodes()
        if found := [node for node in nodes if node.fits(job)]:
            return found
        offers = ", ".join(
            f"{node.name}: {node.cpus} CPUs, {format_size(node.memory)}" for node in nodes
        )
        raise UsageError(
            f"no node of the Ray cluster has {job.cpus} CPUs and {format_size(job.memory)} of "
            f"memory for ktconv ({offers})",
            "use fewer --threads or a smaller --max-memory, or add a node: ray start --address",
        )

    def default_cpus(self) -> int:
        """Threads of a job where none are given: what the smallest working node has, up to 8."""
        return min([node.cpus for node in self.nodes() if node.cpus] + [DEFAULT_CPUS])

    def capacity(self, job: Job) -> int:
        return sum(node.fits(job) for node in self.nodes())

    def submit(self, job: Job, avoid: frozenset[str] = frozenset()) -> Hashable:
        options: dict[str, Any] = {
            "num_cpus": job.cpus, "memory": job.memory or None, "name": job.key,
            "resources": job.resources, "scheduling_strategy": "SPREAD",
        }  # fmt: skip
        if job.node is not None:
            options["scheduling_strategy"] = self._on(job.node, soft=False)
        elif avoid:
            others = [node.id for node in self.nodes() if node.fits(job) and node.id not in avoid]
            if others:
                options["scheduling_strategy"] = self._on(others[0], soft=True)
        arguments = json.dumps(job.arguments)
        generator: Hashable = self._task.options(**options).remote(
            job.key, KINDS[job.kind], arguments, fingerprint()
        )
        return generator

    def _on(self, node: str, soft: bool) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=soft)

    def wait(
        self, handles: Sequence[Hashable], seconds: float
    ) -> Iterable[tuple[Hashable, Message]]:
        ready, _ = self._ray.wait(list(handles), timeout=seconds)
        if ready:
            more, _ = self._ray.wait(list(handles), num_returns=len(handles), timeout=0)
            ready = more or ready
        for generator in ready:
            yield generator, self._next(generator)

    def _next(self, generator: Any) -> Message:
        try:
            message: Message = self._ray.get(next(generator))
            return message
        except StopIteration:
            return _lost("it ended without a result")
        except self._ray.exceptions.RayError as error:
            return _lost(_in_words(error))

    def cancel(self, handles: Sequence[Hashable]) -> None:
        for generator in handles:
            self._ray.cancel(generator, force=True)


def _lost(message: str) -> Message:
    return {
        "event": "failed", "message": message, "hint": None, "exit_code": 3, "mendable": True
    }  # fmt: skip


def _in_words(error: Exception) -> str:
    """Reason, in words, why Ray has no result."""
    name = type(error).__name__
    known = {
        "NodeDiedError": "its node died",
        "OutOfMemoryError": "its node ran out of memory",
        "WorkerCrashedError": "its process was killed",
        "LocalRayletDiedError": "its node died",
        "ObjectLostError": "its node died",
        "OwnerDiedError": "its driver died",
    }
    if name in known:
        return known[name]
    text = str(error)
    if "No module named 'ktconv" in text:
        return "ktconv is not installed for the Python that Ray runs there"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Ray reported {name}: {lines[-1] if lines else ''}"


# ---- connecting ------------------------------------------------------------------------


@contextmanager
def connected(address: str = AUTO, cpus: int | None = None) -> Iterator[Cluster]:
    """The cluster at `address`: HOST:PORT, auto (RAY_ADDRESS, or the one of this machine) or local
    (started now, with `cpus`, and ended with this process). UsageError or ResourceError if it
    cannot be used. A process that is connected stays so."""
    ray = _library()
    wanted = os.environ.get("RAY_ADDRESS") or AUTO if address == AUTO else address
    _check_address(wanted)
    if ray.is_initialized():
        yield Cluster(ray)
        return
    options: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False}
    try:
        ray.init(
            address=wanted, logging_level="ERROR", log_to_driver=False,
            **(options if wanted == LOCAL else {}),
        )  # fmt: skip
    except Exception as error:  # Ray has no one class for this
        raise _refused(wanted, error) from error
    _keep_stdout_clean()
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _keep_stdout_clean() -> None:
    """Ray prints on stdout what its daemons report, also with `log_to_driver=False`; results are
    there. What concerns our jobs, their failures say; the rest is in Ray's logs."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _library() -> Any:
    if find_spec("ray") is None:
        raise UsageError(
            "--ray needs ray, which is not installed", "install it with: pip install 'ktconv[ray]'"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


def _check_address(address: str) -> None:
    """Ray waits long, and logs much, for a cluster that is not there."""
    if address in (AUTO, LOCAL):
        return
    if address.startswith("ray://"):
        raise UsageError(
            f"--ray {address} is the address of a Ray client, which cannot stream results",
            "give HOST:PORT of the head node (ray start prints it), or use ray job submit",
        )
    match = _HOST_PORT.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise UsageError(f"--ray {address} is no HOST:PORT", _START)
    try:
        host = match["host"].strip("[]")
        socket.create_connection((host, int(match["port"])), CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResourceError(
            f"no Ray cluster answers at {address}: {reason}",
            "check the address (ray status on the head node prints it) and firewalls",
        ) from error


def _wants_token(error: BaseException | None) -> bool:
    """Whether this, or what it follows from, is about authentication: Ray's outermost error says
    only that there is no connection."""
    while error is not None:
        if _TOKEN.search(f"{type(error).__name__} {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refused(address: str, error: Exception) -> UsageError | ResourceError:
    text = " ".join(str(error).split())
    if _wants_token(error):
        # Ray sends no token to an address that is given, unless it is told to; nor does ktconv.
        where = "of this machine" if address == AUTO else f"at {address}"
        return ResourceError(
            f"the Ray cluster {where} wants a token, and got none or another one",
            "set RAY_AUTH_MODE=token, and have the cluster's token in ~/.ray/auth_token or in the "
            "file that RAY_AUTH_TOKEN_PATH names",
        )
    if isinstance(error, ConnectionError) and address == AUTO:
        return UsageError("--ray found no Ray cluster on this machine", _START)
    sentence = text.split(". ")[0][:200] or type(error).__name__
    if address == LOCAL:  # one Python and one Ray
        return ResourceError(
            f"no Ray cluster could be started on this machine: {sentence}",
            "the machine may be busy or out of memory: run the same command again, or without "
            "--ray; the logs of Ray are in /tmp/ray",
        )
    return ResourceError(
        f"the Ray cluster at {address} cannot be used: {sentence}",
        "check that all nodes have the same versions of Python and ray",
    )


def raise_of_node(failure: Failure, node: Node) -> NoReturn:
    """The error of a job that only `node` could run."""
    error = KtconvError(f"{node.name}: {failure.message}", failure.hint)
    error.exit_code = failure.exit_code
    raise error
