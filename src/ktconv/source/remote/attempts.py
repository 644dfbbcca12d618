"""Requests that are tried again, with growing pauses, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ktconv.errors import KtconvError, ResourceError, UsageError
from ktconv.source.remote.network_errors import cause, first_line, status_of
from ktconv.source.remote.store import Store
from ktconv.system import waiting
from ktconv.system.stores import transfer
from ktconv.system.units import counted

ATTEMPTS = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds; about a minute in all
LONGEST_ASKED = 300.0  # seconds that a server can ask for
sleep = waiting.sleep

T = TypeVar("T")


class ShortReadError(OSError):
    """A server sent fewer bytes than were asked for, or more."""


def retry_after(error: BaseException) -> float:
    """Seconds that a server asks to wait for, at most LONGEST_ASKED; 0 where it asks for none, or
    names a date."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    headers = headers or getattr(error, "headers", None) or {}
    try:
        asked = float(headers.get("Retry-After") or headers.get("retry-after") or 0)
    except (AttributeError, TypeError, ValueError):
        return 0.0
    return min(asked, LONGEST_ASKED) if asked > 0 else 0.0  # NaN is not


def attempt(store: Store, call: Callable[[], T]) -> T:
    """The result of `call`, tried again where the store says that this can help. Raises what
    `store.explain` makes of the last error, and KeyboardInterrupt where an interrupt comes while it
    waits."""
    try:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt
        from tenacity.wait import wait_exponential, wait_random
    except ImportError:
        raise UsageError(
            "reading over a network needs the package tenacity, which is not installed",
            "install it with: pip install 'ktconv[remote]'",
        ) from None
    growing = wait_exponential(FIRST_PAUSE, LONGEST_PAUSE) + wait_random(0, FIRST_PAUSE)

    def pause(state: Any) -> float:
        return max(growing(state), retry_after(state.outcome.exception()))

    retrying = Retrying(
        sleep=sleep,
        stop=stop_after_attempt(ATTEMPTS),
        wait=pause,
        retry=retry_if_exception(
            lambda error: (
                isinstance(error, ShortReadError)
                or (isinstance(error, Exception) and store.transient(error))
            )
        ),
        before_sleep=lambda state: _tell(store, state),
        reraise=True,
    )
    try:
        return retrying(lambda: waiting.answer(call, store.url.shown))
    except KtconvError:
        raise
    except ShortReadError as error:
        raise ResourceError(
            f"{error}, {ATTEMPTS} times in a row",
            "a server or proxy on the way changes its answers: run the same command again later, "
            "or from another network; finished layers are kept",
        ) from error
    except Exception as error:
        if (found := store.explain(error)) is None:
            raise
        raise found from error


def _tell(store: Store, state: Any) -> None:
    """A request failed, and is sent again after a pause."""
    transfer.add(retries=1)
    pause, error = state.next_action.sleep, state.outcome.exception()
    if pause < waiting.SHOWN_SECONDS:
        return
    status = status_of(error) or getattr(error, "status", None)
    why = f"it answered {status}" if status else f"a request failed ({first_line(cause(error))})"
    asked = ", and asked for this pause" if retry_after(error) == pause else ""
    tries = f"then comes try {state.attempt_number + 1} of {ATTEMPTS}"
    waiting.tell(waiting.Wait(store.url.shown, f"{why}{asked}; {tries}", round(pause, 1)))


def fetch(store: Store, name: str, start: int, stop: int) -> bytes | bytearray:
    """Exactly these bytes of a file."""

    def once() -> bytes | bytearray:
        transfer.add(requests=1)
        data = store.read(name, start, stop)
        transfer.add(nbytes=len(data))
        if len(data) != stop - start:
            sent, asked = counted(len(data), "byte"), counted(stop - start, "byte")
            raise ShortReadError(
                f"{store.url.shown} sent {sent} where {asked} were asked for, from {start} on of "
                f"{name}"
            )
        return data

    return attempt(store, once) if stop > start else b""
