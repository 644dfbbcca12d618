"""Waits that the first interrupt ends, in any thread, and that the user sees.

A handler of signals runs in the main thread, between any two of its instructions, and may wait for
no lock: it writes a byte into a pipe, at which all waits look.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import cache
from typing import ClassVar, TypeVar

from msgspec import Struct

T = TypeVar("T")

SHOWN_SECONDS = 2.0  # shorter waits are not worth a line
SLOW_SECONDS = 30.0  # without an answer, after which the wait for it is shown
AGAIN_SECONDS = 60.0  # between two lines about the same
_SLICE = 0.1  # between two looks at the pipe, of waits that cannot poll it


class Wait(Struct, frozen=True):
    """A wait: its subject, its reason and its seconds, None if they are not known."""

    subject: str
    why: str
    seconds: float | None = None

    @property
    def words(self) -> str:
        """A sentence."""
        long = "" if self.seconds is None else f" {self.seconds:.0f} s"
        return f"Waiting{long} for {self.subject}: {self.why}."


Listener = Callable[[Wait], None]


class _Shown:
    """Listeners, of which the last shows waits, and what it has shown."""

    lock = threading.Lock()
    listeners: ClassVar[list[Listener]] = []
    until: ClassVar[dict[str, float]] = {}  # by subject: when it may be said again


@contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Report the waits of this process to `listener`, which any thread may call. Calls of several
    threads may end in another order than they began."""
    with _Shown.lock:
        _Shown.listeners.append(listener)
    try:
        yield
    finally:
        with _Shown.lock:
            _Shown.listeners.remove(listener)
            _Shown.until.clear()


def tell(found: Wait) -> None:
    """Tell of a wait that begins, unless the same is waited for already."""
    with _Shown.lock:
        now = time.monotonic()
        if not _Shown.listeners or now < _Shown.until.get(found.subject, 0.0):
            return
        _Shown.until[found.subject] = now + (found.seconds or AGAIN_SECONDS)
        _Shown.listeners[-1](found)


# ---- interrupts ------------------------------------------------------------------------


@cache
def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return reading, writing


class _Ended:
    """Contexts that an interrupt ends, and whether a call goes on in a thread after one."""

    by_interrupts = 0  # open contexts of commands
    left_behind = False


@contextmanager
def interrupts_end_waits() -> Iterator[Callable[[], None]]:
    """Yields what a handler of signals calls: all waits of this process end then, with
    KeyboardInterrupt, and none begins until the context ends."""
    reading, writing = _pipe()

    def end() -> None:
        os.write(writing, b"!")

    _Ended.by_interrupts += 1
    try:
        yield end
    finally:
        _Ended.by_interrupts -= 1
        while _interrupted(0.0):
            os.read(reading, 64)


def _interrupted(seconds: float) -> bool:
    """Whether an interrupt came, or comes within these seconds."""
    polled = select.poll()
    polled.register(_pipe()[0], select.POLLIN)
    return bool(polled.poll(seconds * 1000))


def sleep(seconds: float) -> None:
    """Wait, but not beyond an interrupt: KeyboardInterrupt then."""
    if _interrupted(seconds):
        raise KeyboardInterrupt


def answer(call: Callable[[], T], subject: str) -> T:
    """Result of `call`, which waits for `subject` and cannot be interrupted itself: it goes on in a
    thread that nobody waits for. KeyboardInterrupt after an interrupt."""
    if threading.current_thread() is threading.main_thread():
        return call()  # where Python raises the interrupt
    started = time.monotonic()

    def look() -> None:
        if (passed := time.monotonic() - started) > SLOW_SECONDS:
            tell(Wait(subject, f"it was asked {passed:.0f} s ago and has not answered"))

    return _in_thread(call, look)


def abandoned(call: Callable[[], T]) -> T:
    """Result of `call`, of a library that waits for threads of its own whatever is raised. In a
    command, an interrupt leaves it behind in a thread, for the end of the process; elsewhere
    nothing would end it, so that the library is waited for."""
    if not _Ended.by_interrupts:
        return call()
    try:
        return _in_thread(call, lambda: None)
    except KeyboardInterrupt:
        _Ended.left_behind = True
        raise


def left_behind() -> bool:
    """Whether an interrupt left a library's threads behind, for which the end of Python waits."""
    return _Ended.left_behind


def _in_thread(call: Callable[[], T], look: Callable[[], None]) -> T:
    """`look` is called from time to time while `call` runs."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    sleep(0.0)
    threading.Thread(target=work, name="ktconv-request", daemon=True).start()
    while not future.done():
        wait([future], _SLICE)
        sleep(0.0)
        if not future.done():
            look()
    return future.result()
