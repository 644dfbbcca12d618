"""Signals and standard streams of the process.

Imports only modules that the interpreter has already loaded, so that the signal handlers are
installed before the slow imports.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # exit code


def quit_on_signals() -> None:
    """Install `quit_at_once` for all signals that are not ignored (nohup ignores SIGHUP)."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, quit_at_once)


def quit_at_once(*_: object) -> NoReturn:
    """Signal handler for times when no work is in progress.

    An exception raised in the middle of an import could be printed or swallowed there.
    """
    os._exit(INTERRUPTED)


def open_streams() -> None:
    """Open all three standard streams; output continues when its reader is gone.

    Without a descriptor 1 or 2, files that are opened later would get these numbers, and
    everything that a library prints.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _text_stream(sys.stdout, OutputStream(1, BrokenPipeError))
    sys.stderr = _text_stream(sys.stderr, OutputStream(2, OSError))


class OutputStream(io.FileIO):
    """Standard output or error. What cannot be written for a forgiven reason is dropped, as is
    everything after the first failure: a lost reader or log must not end an hour of work."""

    def __init__(self, descriptor: int, forgiven: type[OSError]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._forgiven, self._lost = forgiven, False

    @property
    def lost(self) -> bool:
        """Whether what is written is dropped."""
        return self._lost

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            return size if self._lost else self._written(data)
        except OSError as error:
            self._lost = True
            if isinstance(error, self._forgiven):
                return size
            raise

    def _written(self, data: Any) -> int:
        """Bytes that were written; waits for a slow reader that does not block."""
        while (count := super().write(data)) is None:
            select.select((), (self,), ())
        return count


def _text_stream(stream: Any, raw: OutputStream) -> io.TextIOWrapper:
    """Like `stream`, which is None for a descriptor that was closed, but through `raw`."""
    like = stream if isinstance(stream, io.TextIOWrapper) else None
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding if like else "utf-8",
        errors=like.errors if like else "backslashreplace",
        line_buffering=like.line_buffering if like else False,
        write_through=like.write_through if like else False,
    )
