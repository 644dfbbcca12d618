"""Commands that a Python program calls: documents are returned, errors raised, notes logged.

`called` is the only switch. Where it is on, `output` keeps the document that it would print,
`exits` raises what it would print, and nothing is written to stdout or stderr.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ktconv.errors import KtconvError, ResourceError
from ktconv.system.text import valid_unicode

LOG = logging.getLogger("ktconv")  # at level INFO: what the command line notes on stderr


class _Running:
    """The number of commands that are running as library calls.

    A context variable would not do: worker threads emit notes too, and do not inherit it."""

    lock = threading.Lock()
    count = 0


_document: ContextVar[list[Any] | None] = ContextVar("document", default=None)


@contextmanager
def called() -> Iterator[list[Any]]:
    """The command inside runs for a program; its document is in the list afterwards."""
    found: list[Any] = []
    token = _document.set(found)
    with _Running.lock:
        _Running.count += 1
    try:
        yield found
    finally:
        with _Running.lock:
            _Running.count -= 1
        _document.reset(token)


def is_called() -> bool:
    """Whether a program runs a command, in whatever thread."""
    return _Running.count > 0


def keep(document: Mapping[str, Any]) -> bool:
    """Keep the document of a command that a program runs, in the types that JSON has; False
    otherwise."""
    found = _document.get()
    if found is None:
        return False
    found.append(json.loads(json.dumps(valid_unicode(document))))
    return True


def raised(error: BaseException, message: str, hint: str | None, code: int) -> KtconvError:
    """Return the exception that a library call raises where the command line prints an error."""
    if isinstance(error, KtconvError):
        error.hint = hint
        return error
    found = ResourceError(message, hint)
    found.exit_code = code
    return found
