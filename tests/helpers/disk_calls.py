"""Calls that change the disk: hooks ahead of them, and commands that a signal hits at the n-th.

Signals are placed by counting, never by time, so a test sees the same on a busy machine. As a
program: `disk_calls.py N WORDS...` runs `ktconv WORDS...` and stops ahead of the N-th call. With
names of modules, or nothing, it is the server of `Commands`, which has them and ktconv imported and
forks a process per command.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn
from unittest.mock import patch

import ktconv

CALLS: dict[str, Any] = {
    "fsync": os, "pwrite": os, "posix_fallocate": os, "replace": Path, "rename": Path, "mkdir": Path
}  # fmt: skip
# What commands import; without it each process would by itself.
IMPORTED = (
    "ktconv.cli.entry", "ktconv.cli", "ktconv.cli.estimate", "ktconv.cli.progress",
    "ktconv.inspect.inspection", "ktconv.quantize.packed.gptq.way", "ktconv.quantize.packed.run",
    "ktconv.source.remote.ahead", "ktconv.verify.command",
)  # fmt: skip
PYTHON_FAILED = 120  # exit code where the last flush of stdout fails
CLOSED, READER_LEFT = "closed", "reader left"  # of standard streams
SOURCES = str(Path(ktconv.__file__).parent)
Hook = Callable[[str, tuple[Any, ...]], None]


@contextmanager
def hooked(before: Hook, one_at_a_time: bool = False) -> Iterator[None]:
    """Calls `before(name, arguments)` ahead of every call that changes the disk; `one_at_a_time`:
    no other thread's call runs meanwhile."""
    turn: AbstractContextManager[Any] = threading.RLock() if one_at_a_time else nullcontext()
    with ExitStack() as patches:
        for name, owner in CALLS.items():
            hook = _hook(name, getattr(owner, name), before, turn)
            patches.enter_context(patch.object(owner, name, hook))
        yield


def _hook(
    name: str, call: Callable[..., Any], before: Hook, turn: AbstractContextManager[Any]
) -> Callable[..., Any]:
    def replacement(*arguments: Any, **named: Any) -> Any:
        with turn:
            before(name, arguments)
            return call(*arguments, **named)

    return replacement


Site = tuple[str | int, ...]


def call_site(name: str) -> Site:
    """Which call of our code this is: its name, and the lines that led to it. For hooks."""
    frames = traceback.walk_stack(None)
    ours = [(frame.f_code.co_filename, line) for frame, line in frames]
    return name, *(part for path, line in ours if SOURCES in path for part in (path, line))


class Sites:
    """Records the call site of every call, in order."""

    def __init__(self) -> None:
        self.found: list[Site] = []
        self._lock = threading.Lock()

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self.found.append(call_site(name))

    def ends(self) -> list[int]:
        """Positions of the first and of the last call from every site."""
        last = {site: position for position, site in enumerate(self.found)}
        first = {site: self.found.index(site) for site in last}
        return sorted({*first.values(), *last.values()})


class Strike:
    """Sends this process a signal ahead of its n-th call. No call goes on before the signal has
    arrived, so what the process does afterwards does not depend on which thread is faster."""

    def __init__(self, call: int, number: int) -> None:
        self._left, self._number = call, number
        self._lock, self._arrived = threading.Lock(), threading.Event()
        self._set_handler = signal.signal
        signal.signal = self._noticing  # type: ignore[assignment]
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _noticing(self, number: int, handler: Any) -> Any:
        def noticed(*arguments: Any) -> Any:
            self._arrived.set()
            return handler(*arguments)

        return self._set_handler(number, noticed if callable(handler) else handler)

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                if self._number in (signal.SIGINT, signal.SIGTERM):
                    signal.pthread_kill(threading.main_thread().ident or 0, self._number)
                    self._arrived.wait()
                else:
                    os.kill(os.getpid(), self._number)


@dataclass(frozen=True)
class Ended:
    """A process that has ended; minus the signal that ended it, as of subprocess."""

    returncode: int
    stdout: str
    stderr: str


class Commands:
    """Runs `ktconv` commands in processes of their own, without a new interpreter for each.

    The interpreter that they are forked from starts with changed environment `variables`, so its
    locale and the encodings of its streams are theirs, and has imported `modules` as well. Words
    `ahead` are a command that starts it."""

    def __init__(
        self, directory: Path, *modules: str, ahead: Sequence[str] = (), **variables: str
    ) -> None:
        self._directory = directory
        self._server = subprocess.Popen(
            [*ahead, sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Threads do not survive a fork.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | variables,
        )

    def run(
        self,
        words: Sequence[object],
        call: int = 0,
        number: int = signal.SIGKILL,
        typed: str = "",
        after: float | None = None,
        group: bool = False,
        variables: Mapping[str, str] | None = None,
        lost: Mapping[int, str] | None = None,
    ) -> Ended:
        """The command's end; with `call`, hit by `number` ahead of that call (counted from 1), or
        with `after` so many seconds after its start, with `group` together with processes that
        it has started. `typed` is on its stdin, `variables` are in its environment. `lost`
        standard streams are CLOSED, pipes of READER_LEFT, or a file."""
        order: dict[str, Any] = {"call": call, "number": number, "after": after, "group": group}
        order |= {"variables": dict(variables or {})}
        return self._ordered([(words, typed, order)], lost or {})[0]

    def run_at_once(self, *commands: Sequence[object]) -> list[Ended]:
        """The ends of several commands that run at the same time."""
        order: dict[str, Any] = {"call": 0, "number": 0, "after": None, "group": False}
        order["variables"] = {}
        return self._ordered([(words, "", order) for words in commands])

    def _ordered(
        self,
        commands: Sequence[tuple[Sequence[object], str, Any]],
        lost: Mapping[int, str] = MappingProxyType({}),
    ) -> list[Ended]:
        orders = []
        for number, (words, typed, order) in enumerate(commands):
            names = (f"stdin{number}", f"stdout{number}", f"stderr{number}")
            streams = [str(self._directory / name) for name in names]
            for path, text in zip(streams, (typed, "", ""), strict=True):
                Path(path).write_text(text)
            # One character per byte: the process decodes its arguments by its own locale.
            encoded = [os.fsencode(str(word)).decode("latin-1") for word in words]
            given = [lost.get(descriptor, path) for descriptor, path in enumerate(streams)]
            orders.append({"words": encoded, "streams": given, "kept": streams, **order})
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(orders), file=self._server.stdin, flush=True)
        codes = json.loads(self._server.stdout.readline())
        return [
            Ended(code, *(Path(path).read_text(errors="replace") for path in order["kept"][1:]))
            for code, order in zip(codes, orders, strict=True)
        ]

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate()


def _end_with_parent() -> None:
    """This process ends with the thread that started it, also while it is stopped. Of processes
    whose parent has one thread; a parent that has ended already is noticed by who calls this."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


_PDEATHSIG = 1


def _serve(modules: list[str]) -> None:
    _end_with_parent()  # has that ended, the orders do, too
    server = os.getpid()
    for module in (*IMPORTED, *modules):
        importlib.import_module(module)
    gc.freeze()  # else a collection in a child copies the pages of all objects
    for line in sys.stdin:
        children = [_start(server, **order) for order in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _start(
    server: int, after: float | None, group: bool, number: int, kept: list[str], **order: Any
) -> int:
    child = os.fork()
    if child == 0:
        _end_with_parent()
        if os.getppid() != server:
            os._exit(1)
        if after is not None:
            os.setpgid(0, 0)
        _execute(number=number, **order)
    if after is not None:
        _hit_after(child, after, number, group)
    return child


def _hit_after(child: int, seconds: float, number: int, group: bool) -> None:
    """Sends a child a signal, unless it has ended before."""
    fd = os.pidfd_open(child)
    try:
        if select.select([fd], [], [], seconds)[0]:
            return
    finally:
        os.close(fd)
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(child, number)


def _run(words: list[str], call: int, number: int) -> None:
    sys.argv = ["ktconv", *words]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ktconv has its own; shells ignore it
    with hooked(Strike(call, number)) if call else nullcontext():
        runpy.run_module("ktconv", run_name="__main__")


def _open_stream(descriptor: int, path: str) -> None:
    """Make a standard stream a file, or one of those that nobody reads."""
    if path == CLOSED:
        os.close(descriptor)
        setattr(sys, ("stdin", "stdout", "stderr")[descriptor], None)  # as in a new interpreter
        return
    if path == READER_LEFT:
        reader, opened = os.pipe()
        os.close(reader)
    elif descriptor:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    else:
        opened = os.open(path, os.O_RDONLY)
    os.dup2(opened, descriptor)
    os.close(opened)


def _execute(
    words: list[str], call: int, number: int, streams: list[str], variables: dict[str, str]
) -> NoReturn:
    """In a child: the command, as `python -m ktconv` runs it."""
    os.environ.update(variables)
    for descriptor, path in enumerate(streams):
        _open_stream(descriptor, path)
    code = 1
    try:
        _run([os.fsdecode(word.encode("latin-1")) for word in words], call, number)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError):  # None where it was closed
                code = code or PYTHON_FAILED
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdecimal():
        _run(sys.argv[2:], int(sys.argv[1]), signal.SIGSTOP)
    else:
        _serve(sys.argv[1:])
