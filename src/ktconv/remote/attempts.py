"""Requests that are tried again, with growing pauses, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ktconv.errors import KtconvError, UsageError
from ktconv.remote.store import Store
from ktconv.system.elsewhere import transfer

ATTEMPTS = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds; about a minute in all

T = TypeVar("T")


class ShortReadError(OSError):
    """A server sent fewer bytes than were asked for, or more."""


def attempt(store: Store, call: Callable[[], T]) -> T:
    """The result of `call`, tried again where the store says that this can help. Raises what
    `store.explain` makes of the last error."""
    try:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt
        from tenacity.wait import wait_exponential, wait_random
    except ImportError:
        raise UsageError(
            "reading over a network needs the package tenacity, which is not installed",
            "install it with: pip install 'ktconv[remote]'",
        ) from None
    retrying = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(FIRST_PAUSE, LONGEST_PAUSE) + wait_random(0, FIRST_PAUSE),
        retry=retry_if_exception(
            lambda error: isinstance(error, ShortReadError) or store.transient(error)
        ),
        before_sleep=lambda _: transfer.add(retries=1),
        reraise=True,
    )
    try:
        return retrying(call)
    except KtconvError:
        raise
    except Exception as error:
        if (found := store.explain(error)) is None:
            raise
        raise found from error


def fetch(store: Store, name: str, start: int, stop: int) -> bytes | bytearray:
    """Exactly these bytes of a file; what is here already is not asked for."""
    missing = store.missing(name, start, stop)
    if list(missing) == [(start, stop)]:
        return _fetched(store, name, start, stop)
    data = bytearray(stop - start)
    for first, last in missing:
        _fetched(store, name, first, last)  # and kept
    store.fill(name, memoryview(data), start)
    return data


def _fetched(store: Store, name: str, start: int, stop: int) -> bytes | bytearray:

    def once() -> bytes | bytearray:
        transfer.add(requests=1)
        data = store.read(name, start, stop)
        transfer.add(nbytes=len(data))
        if len(data) != stop - start:
            raise ShortReadError(
                f"{store.url.shown} sent {len(data)} of the {stop - start} bytes from {start} on "
                f"of {name}"
            )
        return data

    return attempt(store, once) if stop > start else b""
