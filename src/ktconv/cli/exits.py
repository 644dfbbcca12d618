"""The end of a command: errors and interrupts in words, as exit code, and as JSON."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import click

from ktconv.cli import calls
from ktconv.cli.events import Mode, events, mode, shown_as
from ktconv.cli.output import notify, print_json, sentence
from ktconv.cli.process import INTERRUPTED, SIGNALS
from ktconv.errors import KtconvError
from ktconv.system import waiting
from ktconv.system.files import way_out
from ktconv.system.text import printable

NOTHING_WRITTEN = "Nothing was written."
REPEATED_SECONDS = 1.0  # a terminal and a parent process can both pass on one Ctrl-C

Hints = Mapping[type[BaseException], str]  # what to do next, by class of error
_NO_HINTS: Hints = MappingProxyType({})
_NO_THREADS = (
    "raise the limit of processes (ulimit -u, the container's pids) or of memory (ulimit -v), or "
    "use fewer threads"
)


@contextmanager
def errors_shown(
    as_json: bool = False, hints: Hints = _NO_HINTS, progress: Mode = "auto"
) -> Iterator[None]:
    """Print errors as one sentence and a hint on stderr, and exit with their codes.

    Hints of the command (`hints`) take precedence over the hint of the error. With `as_json` the
    same is on stdout as a JSON document. `progress` is how the command shows what it does: with
    json its last event has the exit code. A program that called the command gets them raised.
    """
    if calls.is_called():
        with waiting.told_to(_show_wait), _caught(as_json, hints):
            yield
        return
    with shown_as(progress), waiting.told_to(_show_wait), _last_event(), _caught(as_json, hints):
        yield


def _show_wait(wait: waiting.Wait) -> None:
    """Show a wait as a line, or emit it as an event; a progress bar moves down for it."""
    if listener := events():
        seconds = None if wait.seconds is None else round(wait.seconds, 1)
        listener.emit("waiting", **{"for": wait.subject}, why=wait.why, seconds=seconds)
    elif mode() != "none" or calls.is_called():
        notify(wait.words)


@contextmanager
def _last_event() -> Iterator[None]:
    """Emit an event for each way to end, with `--progress json`; `_end` has named most errors."""
    listener = events()
    code = 0
    try:
        yield
    except click.exceptions.Exit as error:
        code = error.exit_code
        raise
    except BaseException as error:
        if listener:
            listener.failed(f"internal error: {type(error).__name__}", None, 1)
        raise
    finally:
        if listener:
            listener.emit("finished", exit_code=code)


@contextmanager
def _caught(as_json: bool, hints: Hints) -> Iterator[None]:
    try:
        yield
    except KtconvError as error:
        _fail(error, str(error), _hint(error, hints) or error.hint, error.exit_code, as_json)
    except OSError as error:  # most are caught in the library, which can name the file or tensor
        where = f" {error.filename}" if error.filename else ""
        message = f"the operating system reported an error{where}: {error.strerror or error}"
        hint = _hint(error, hints) or way_out(error)
        if not where and isinstance(error, FileNotFoundError) and not _has_directory():
            message, hint = "the current directory was removed", "change to one that exists (cd)"
        _fail(error, message, hint, 3, as_json)
    except MemoryError as error:
        _fail(error, "out of memory", _hint(error, hints), 3, as_json)
    except RuntimeError as error:
        if "start new thread" not in str(error):  # Python has no class for this error
            raise
        _fail(
            error,
            "cannot start another thread: the limit of this process is reached",
            _NO_THREADS,
            3,
            as_json,
        )
    except KeyboardInterrupt as error:
        if calls.is_called():
            raise
        next_step = error.next_step if isinstance(error, _Interrupted) else None
        if next_step and not events():
            notify("")  # leaves the line on which the terminal shows ^C
            notify(f"Interrupted. {next_step}")
        _end("interrupted", next_step, INTERRUPTED, as_json)


def _has_directory() -> bool:
    """Whether relative paths lead anywhere."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _hint(error: BaseException, hints: Hints) -> str | None:
    return next((text for kind, text in hints.items() if isinstance(error, kind)), None)


def _fail(
    error: BaseException, message: str, hint: str | None, code: int, as_json: bool
) -> NoReturn:
    if calls.is_called():
        raise calls.raised(error, message, hint, code)
    if not events():
        notify(f"Error: {sentence(message)}")
        if hint:
            notify(f"Hint: {sentence(hint)}")
    _end(message, hint, code, as_json)


def _end(message: str, hint: str | None, code: int, as_json: bool) -> NoReturn:
    if listener := events():
        listener.failed(message, hint, code)
    if as_json:
        with suppress(OSError):  # stdout may be what went wrong
            print_error(message, hint, code)
    raise click.exceptions.Exit(code) from None


def print_error(message: str, hint: str | None, code: int) -> None:
    """The JSON document of a command that failed. A program gets the error itself."""
    if calls.is_called():
        return
    print_json({"schema": 1, "error": {"message": message, "hint": hint, "exit_code": code}})


# ---- interrupts ------------------------------------------------------------------------


class _Interrupted(KeyboardInterrupt):
    """An interrupt of work, with the sentence that says how to continue."""

    def __init__(self, next_step: str) -> None:
        super().__init__()
        self.next_step = next_step


@contextmanager
def interruptible(next_step: Callable[[], str]) -> Iterator[None]:
    """End the work cleanly on Ctrl-C, SIGTERM and SIGHUP, and all that it waits for; used inside
    `errors_shown`.

    `next_step` returns the sentence that says how to continue. A second signal during the cleanup
    ends the process at once. Signals of a program that called the command stay its own.
    """
    if calls.is_called():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number, action in before.items() if action is not signal.SIG_IGN]
    with waiting.interrupts_end_waits() as end_waits:
        handler = _Handler(next_step, end_waits)
        for number in caught:
            signal.signal(number, handler)
        try:
            yield
        except KeyboardInterrupt:
            raise _Interrupted(next_step()) from None
        finally:
            for number in caught:
                signal.signal(number, before[number])


class _Handler:
    """Handler of signals during work: the first one raises KeyboardInterrupt."""

    def __init__(self, next_step: Callable[[], str], end_waits: Callable[[], None]) -> None:
        self._way_out, self._end_waits = next_step, end_waits
        self._first: float | None = None

    def __call__(self, *_: Any) -> None:
        if self._first is None:
            self._first = time.monotonic()
            self._end_waits()
            raise KeyboardInterrupt
        if time.monotonic() - self._first > REPEATED_SECONDS:
            with suppress(OSError):  # print could be interrupted inside of itself
                show_cursor = "\x1b[?25h" if os.isatty(2) else ""
                text = f"{show_cursor}\nInterrupted. {printable(self._way_out())}\n"
                os.write(2, text.encode(errors="backslashreplace"))
            os._exit(INTERRUPTED)
