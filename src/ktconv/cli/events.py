"""Progress as JSON lines on stderr (`--progress json`); docs/progress.md describes the events."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ktconv.system.text import valid_unicode

Mode = Literal["auto", "bar", "lines", "json", "none"]
SCHEMA = 1


class Events:
    """One JSON object a line; nothing follows `finished` or `failed`. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ended = False

    def emit(self, event: str, **fields: Any) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = event in ("finished", "failed")
            line = {"schema": SCHEMA, "event": event, **valid_unicode(fields)}
            print(json.dumps(line), file=sys.stderr, flush=True)

    def failed(self, message: str, hint: str | None, code: int) -> None:
        self.emit("failed", exit_code=code, message=message, hint=hint)


class _Command:
    """How the running command shows progress; `events` only with `--progress json`."""

    mode: Mode = "auto"
    events: Events | None = None


def mode() -> Mode:
    return _Command.mode


def events() -> Events | None:
    """What writes the events of the running command, if it writes any."""
    return _Command.events


@contextmanager
def shown_as(chosen: Mode) -> Iterator[None]:
    """Progress and messages of the command inside are shown in this way."""
    _Command.mode = chosen
    _Command.events = Events() if chosen == "json" else None
    try:
        yield
    finally:
        _Command.mode, _Command.events = "auto", None
