"""Jobs that nodes run: kinds, plain arguments, and the messages that come back."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct, field

import ktconv
from ktconv.errors import KtconvError, ResourceError, VerificationError
from ktconv.system import waiting
from ktconv.writer.journal import Record

Message = dict[str, Any]  # "event" and its fields: plain values, and bytes in "piece"

PROGRESS_SECONDS = 0.5  # between messages about progress
PIECES = 4  # of a file, that wait for the driver
# Function of each kind: called with the arguments and a Reporter, returns plain values.
KINDS: dict[str, str] = {
    "convert": "ktconv.distributed.units:convert",
    "look": "ktconv.distributed.units:look",
    "verify": "ktconv.distributed.verification:check",
}


class Job(Struct, frozen=True):
    """Work that one node does at a time. `arguments` and the result are JSON values."""

    key: str  # names it for users, as layer-00003
    kind: str  # of KINDS
    arguments: Record
    cpus: int = 1
    memory: int = 0  # bytes
    node: str | None = None  # id of the only node that may run it
    resources: dict[str, float] = field(default_factory=dict)  # others that nodes offer


class Failure(Struct, frozen=True):
    """Reason why a job, or one attempt at it, ended without a result."""

    key: str
    message: str
    hint: str | None = None
    node: str = ""  # its name; "" if it is not known
    exit_code: int = 3
    mendable: bool = False  # by another attempt, best on another node


class Cancelled(Exception):
    """Ends a job whose driver is gone or wants no more."""


class Reporter:
    """Channel by which a running job tells the driver what it does. Safe to use from several
    threads."""

    def __init__(self) -> None:
        self._messages: queue.Queue[Message] = queue.Queue(PIECES)
        self._lock = threading.Lock()
        self._nbytes = 0
        self._cancelled = False

    def advanced(self, nbytes: int) -> None:
        """Add bytes of the source that are done. Cancelled where that is of no use."""
        with self._lock:
            self._nbytes += nbytes
            if self._cancelled:
                raise Cancelled

    def piece(self, file: str, offset: int, data: bytes) -> None:
        """A part of a result's file; the parts of a file come in order."""
        self._put({"event": "piece", "file": file, "offset": offset, "data": data})

    def waits(self, wait: waiting.Wait) -> None:
        """The job waits for something outside of it."""
        self._put({"event": "noted", "text": wait.words})

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True

    def _put(self, message: Message) -> None:
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
            try:
                return self._messages.put(message, timeout=PROGRESS_SECONDS)
            except queue.Full:
                continue

    def _end(self, message: Message) -> None:
        try:
            self._put(message)
        except Cancelled:
            return

    def run(self, key: str, function: Callable[[], Record]) -> None:
        """Call `function`; its result or its error is the last message."""
        try:
            self._end({"event": "done", "result": function()})
        except Cancelled:
            return
        except BaseException as error:
            if not isinstance(error, KtconvError):
                traceback.print_exc()  # to the log of the worker
            self._end(failed(error))

    def messages(self) -> Iterator[Message]:
        """Messages of a job, up to the last one."""
        before = 0
        while True:
            try:
                message = self._messages.get(timeout=PROGRESS_SECONDS)
            except queue.Empty:
                message = None
            with self._lock:
                nbytes = self._nbytes
            if nbytes > before:
                yield {"event": "advanced", "nbytes": nbytes - before}
                before = nbytes
            if message is not None:
                yield message
                if message["event"] in ("done", "failed"):
                    return


def failed(error: BaseException) -> Message:
    """The message about an error; what a disk or memory does on one node, another can mend."""
    message = {"event": "failed", "hint": None, "exit_code": 3, "mendable": False}
    if isinstance(error, KtconvError):
        mendable = isinstance(error, (ResourceError, VerificationError))
        code = error.exit_code
        return message | {
            "message": str(error), "hint": error.hint, "exit_code": code, "mendable": mendable
        }  # fmt: skip
    if isinstance(error, MemoryError):
        return message | {"message": "out of memory", "mendable": True}
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        words = f"the operating system reported an error{where}: {error.strerror or error}"
        return message | {"message": words, "mendable": True}
    name = type(error).__name__
    return message | {"message": f"internal error: {name}: {error}", "exit_code": 1}


def perform(key: str, target: str, arguments: Record, code: str) -> Iterator[Message]:
    """Run one job in this process. `code` is the driver's `fingerprint`; nodes that have other code
    refuse."""
    yield {"event": "started", "node": node_name(), "process": os.getpid()}
    if code != fingerprint():
        yield other_code(code)
        return
    module, name = target.split(":")
    reporter = Reporter()

    def call() -> Record:
        result: Record = getattr(import_module(module), name)(arguments, reporter)
        return result

    thread = threading.Thread(target=reporter.run, args=(key, call), daemon=True)
    with waiting.told_to(reporter.waits), waiting.interrupts_end_waits() as end_waits:
        thread.start()
        try:
            yield from reporter.messages()
        finally:  # also where the driver cancels
            reporter.cancel()
            end_waits()
            thread.join()


def other_code(code: str) -> Message:
    """The failure of a node whose ktconv is not the driver's."""
    message = f"{node_name()} has ktconv {fingerprint()}, the driver {code}"
    hint = "install the same version on all nodes; what is in brackets is of the files of it"
    return {
        "event": "failed", "message": message, "hint": hint, "exit_code": 2, "mendable": False
    }  # fmt: skip


def node_name() -> str:
    """Host name of this machine."""
    return socket.gethostname()


@cache
def fingerprint() -> str:
    """Version of ktconv and a checksum of its code, which differs between states of a checkout."""
    root = Path(ktconv.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{ktconv.__version__} ({digest.hexdigest()[:12]})"


def perform_on_node(key: str, target: str, arguments: str, code: str) -> Iterator[Message]:
    """The function that Ray calls on a node, where it is found by its name in the installed ktconv:
    `perform` with the arguments as JSON text; the first message has the node's id."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    for message in perform(key, target, json.loads(arguments), code):
        yield message | {"node_id": node} if message["event"] == "started" else message
